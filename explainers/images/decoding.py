"""Decodes image files to upright RGB images with 8 bits per channel."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from explainers.errors import InputError

DECODING_ERRORS = (OSError, SyntaxError, ValueError, TypeError, KeyError, struct.error, Image.DecompressionBombError)
"""What Pillow raises for damaged files."""

LOWEST_WHITE = 2**12
"""If all values of a 16-bit image are below this number, only 8 or 12 bits are used: it would look nearly black."""


class CorruptImage(InputError):
    """An image file that cannot be decoded, or whose brightest possible value is unknown."""


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert to 3 channels of 8 bits. Grey is repeated, transparent pixels show white, 16 bits keep their high byte.

    Raises:
        InputError: if the brightest possible value is unknown: floats, more than 16 bits, or 8 or 12 bits in 16.

    >>> as_rgb(Image.fromarray(np.array([[0x8102]], dtype=np.uint16))).getpixel((0, 0))
    (129, 129, 129)
    """
    if image.mode.startswith(("I", "F")):  # more than 8 bits: Pillow would clip them at 255
        pixels = np.asarray(image)
        if image.mode == "F" or pixels.min() < 0 or pixels.max() >= 2**16:
            raise InputError(
                f"expected 8 or 16 bits a channel, got mode {image.mode}, {pixels.min()} to {pixels.max()};"
                " convert it to 8 bits"
            )
        if 0 < pixels.max() < LOWEST_WHITE:
            raise InputError(
                f"expected values up to 65535 in a 16-bit image, got values up to {pixels.max()}, which would be nearly"
                " black; if they have 8 or 12 bits, convert it to 8 bits"
            )
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


@contextmanager
def errors_of_file(path: Path) -> Iterator[None]:
    """Raise a CorruptImage that names the file for what Pillow raises in the block."""
    try:
        yield
    except DECODING_ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, the permissions or the open files says nothing about the image
        raise CorruptImage(
            f"{path}: expected an image, got {path.stat().st_size} bytes that cannot be decoded ({error})"
        ) from error


def decode(path: Path) -> Image.Image:
    """Decode an image file in its own mode, with its stored rows and columns.

    Raises:
        CorruptImage: if the bytes cannot be decoded.
    """
    with errors_of_file(path), Image.open(path) as image:
        image.load()
    return image


def stored_size(path: Path) -> tuple[int, int]:
    """Height and width of an image file, of which only the header is read.

    Raises:
        CorruptImage: if the header cannot be read.
    """
    with errors_of_file(path), Image.open(path) as image:
        return image.height, image.width


def read_image(path: Path, upright: bool = True) -> Image.Image:
    """Decode a file to RGB at its stored size, see `as_rgb`.

    Args:
        path: the image file.
        upright: turn the image by its EXIF orientation, as image viewers do; False keeps the stored rows and columns
            (except in TIFF files, which Pillow always turns).

    Raises:
        CorruptImage: if the bytes cannot be decoded, or the brightest possible value is unknown.
    """
    image = decode(path)
    if upright:
        turn_upright(image)
    try:
        return as_rgb(image)
    except DECODING_ERRORS as error:  # also InputError
        raise CorruptImage(f"{path}: {error}") from error


def turn_upright(image: Image.Image) -> None:
    """Turn a decoded image in place by its EXIF orientation. With broken metadata, it stays as it is."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except DECODING_ERRORS:
        return


def resize_short_side(image: Image.Image, size: int) -> Image.Image:
    """Scale the short side to `size` pixels and keep the aspect ratio; bicubic, antialiased.

    >>> resize_short_side(Image.new("RGB", (400, 200)), 100).size
    (200, 100)
    """
    width, height = scaled(image.size, size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def scaled(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Both sides of an image whose short side is scaled to `short_side` pixels; the long one is rounded down."""
    first, second = (side * short_side // min(size) for side in size)
    return first, second


ELONGATED = 10
"""Aspect ratio above which only the middle of an image is resized, because the whole would take too much memory."""


def middle_square(
    image: Image.Image, size: int, resampling: Image.Resampling = Image.Resampling.BICUBIC
) -> Image.Image:
    """Scale the short side to `size` pixels, and crop the square in the centre, as timm does with crop_pct=1.

    >>> middle_square(Image.new("RGB", (400, 200)), 100).size
    (100, 100)
    """
    width, height = image.size
    short = min(image.size)
    if max(image.size) > ELONGATED * short:
        left = max(0, (width - ELONGATED * short) // 2)
        top = max(0, (height - ELONGATED * short) // 2)
        image = image.crop((left, top, width - left, height - top))
    width, height = scaled(image.size, size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), resampling).crop((left, top, left + size, top + size))
