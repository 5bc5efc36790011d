"""Decodes image files to upright RGB images with 8 bits per channel."""

import io
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

from explainers.errors import InputError

DECODING_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, RuntimeError, struct.error),
    Image.DecompressionBombError,
)
"""What Pillow raises for damaged files."""

FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "HEIF", "JPEG2000"),
    *("PPM", "PCX", "QOI", "SGI", "TGA"),
)
"""Kinds of images that are decoded, whatever a file is called. Pillow opens others too, EPS by running Ghostscript."""

LOWEST_WHITE = 2**12
"""If all values of a 16-bit image are below this number, only 8 or 12 bits are used: it would look nearly black."""

White = float | tuple[float, float] | None
"""Value of white in images of more than 8 bits, where black is 0; or the values of black and white."""


class CorruptImage(InputError):
    """An image file that cannot be decoded, or whose brightest possible value is unknown."""


def convert_to_rgb(image: Image.Image, white: White = None) -> Image.Image:
    """Convert to 3 channels of 8 bits, in the colours of sRGB. Grey is repeated, and transparent pixels show white.

    More than 8 bits are scaled to `white`; without it, 16 bits keep their high byte. An InputError for floats, more
    than 16 bits, or 8 or 12 bits in 16, whose brightest possible value is then unknown.

    >>> convert_to_rgb(Image.fromarray(np.array([[0x8102]], dtype=np.uint16))).getpixel((0, 0))
    (129, 129, 129)
    """
    if image.mode.startswith(("I", "F")):  # more than 8 bits: Pillow would clip them at 255
        pixels = np.asarray(image)
        if white is not None:
            pixels = scale_to_16_bits(pixels, white)
        elif image.mode == "F" or pixels.min() < 0 or pixels.max() >= 2**16:
            raise InputError(
                f"expected 8 or 16 bits a channel, got mode {image.mode}, {pixels.min()} to {pixels.max()};"
                " convert it to 8 bits, or give the model white=, the value of white",
                "white",
            )
        elif 0 < pixels.max() < LOWEST_WHITE:
            raise InputError(
                f"expected values up to 65535 in a 16-bit image, got values up to {pixels.max()}, which would be nearly"
                " black; if they have 8 or 12 bits, convert it to 8 bits, or give the model white=4095",
                "white",
            )
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    image = _convert_to_srgb(image.convert(image.mode.upper()) if image.mode in ("La", "RGBa") else image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = Image.new("RGBA", image.size, "white")
    opaque.alpha_composite(image.convert("RGBA"))
    return opaque.convert("RGB")


def scale_to_16_bits(pixels: np.ndarray, white: White) -> np.ndarray:
    """Scale numbers of any type to uint16: black becomes 0, and white 65535. Those beyond are clipped, with a warning.

    >>> scale_to_16_bits(np.array([-1.0, 0.0, 1.0]), (-1, 1)).tolist()
    [0, 32768, 65535]

    Raises:
        InputError: if `white` is not stated, or values are not finite.
    """
    low, high = pixels.min(), pixels.max()
    if white is None or not np.isfinite([low, high]).all():
        raise InputError(
            f"expected white=, the value of white, for {pixels.dtype} pixels, got values from {low} to {high}: give the"
            " model white=4095 for 12 bits, 65535 for 16, or white=(black, white)",
            "white",
        )
    black, top = white if isinstance(white, tuple | list) else (0, white)
    beyond = np.count_nonzero((pixels < black) | (pixels > top)) / pixels.size
    if beyond:
        warnings.warn(f"{beyond:.1%} of the pixels are beyond white={white}, and are clipped to it", stacklevel=2)
    scaled = (pixels.clip(black, top).astype(np.float64) - black) / (top - black)
    return np.round(65535 * scaled).astype(np.uint16)


def _convert_to_srgb(image: Image.Image) -> Image.Image:
    """Convert an image of 8 bits with a colour profile to sRGB; of a profile that cannot be read, a warning tells."""
    data = image.info.get("icc_profile")
    if not data or image.mode not in ("L", "RGB", "RGBA", "CMYK"):
        return image
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(data))
        if "sRGB" in ImageCms.getProfileDescription(profile):
            return image
        mode = "RGBA" if image.mode == "RGBA" else "RGB"
        converted = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode=mode)
    except (ImageCms.PyCMSError, OSError) as error:
        warnings.warn(f"left out: a colour profile that cannot be read ({error})", stacklevel=2)
        return image
    return converted or image


@cache
def formats() -> list[str]:
    """Those of `FORMATS` that this Pillow has; HEIF where pillow-heif is installed."""
    try:
        import pillow_heif
    except ImportError:
        pass
    else:
        pillow_heif.register_heif_opener()
    Image.init()  # it loads all plugins
    return [name for name in FORMATS if name in Image.OPEN]


@contextmanager
def _name_errors(name: str | Path, size: Callable[[], int]) -> Iterator[None]:
    """Raise a CorruptImage that names the image, and its size in bytes, for what Pillow raises in the block."""
    try:
        yield
    except CorruptImage:
        raise
    except Image.DecompressionBombError as error:
        pixels = f"{int(re.search(r'[0-9]+', str(error))[0]) / 1e6:.3g}"  # type: ignore[index]  # it says their number
        most = f"{2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6:.3g} megapixels"
        raise CorruptImage(
            f"{name}: expected at most {most}, got {pixels}: cut it into tiles, or make it smaller"
        ) from error
    except DECODING_ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, the permissions or the open files says nothing about the image
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
        message = f"{name}: expected an image, got {size()} bytes that cannot be decoded ({reason})"
        raise CorruptImage(message) from error


@contextmanager
def _open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image file and read its header; errors inside the block become a CorruptImage that names it."""
    with _name_errors(path, lambda: path.stat().st_size), _open(path) as image:
        yield image


def _open(file: Path | io.BytesIO) -> Image.Image:
    """Open an image of any size below Pillow's limit, without its warning from half of the limit on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(file, formats=formats())


def decode(path: Path) -> Image.Image:
    """Decode an image file in its own mode, with its stored rows and columns; a CorruptImage if that fails.

    Of several pages or frames, the first is decoded, and a warning says so.
    """
    with _open_image(path) as image:
        count = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # photos of phones have a second JPEG
        if count > 1:
            warnings.warn(f"{path.name} has {count} pages or frames: the first is read", stacklevel=3)
        image.load()
    return image


def decode_upload(name: str, data: bytes, most_pixels: int) -> Image.Image:
    """Decode the bytes of an image file that nobody here has chosen, to upright RGB, see `read_image`.

    A larger JPEG is decoded at a half, a quarter or an eighth of its size, at which it has at most `most_pixels`; a
    CorruptImage refuses other images of more pixels, and bytes that cannot be decoded.
    """
    with _name_errors(name, lambda: len(data)):
        image = _open(io.BytesIO(data))
        factor = next((each for each in (1, 2, 4) if image.width * image.height <= most_pixels * each**2), 8)
        image.draft(None, (image.width // factor, image.height // factor))  # other kinds than JPEG stay as they are
        if image.width * image.height > most_pixels:
            most = f"{most_pixels / 1e6:.3g} megapixels"
            raise CorruptImage(f"{name}: expected at most {most}, got {image.width} x {image.height}: make it smaller")
        image.load()
    return _as_upright_rgb(name, image)


def read_orientation(path: Path) -> int:
    """EXIF orientation of an image file, from 1 to 8, by its header; 1 with broken metadata."""
    with _open_image(path) as image:
        try:
            orientation = image.getexif().get(ExifTags.Base.Orientation)
        except DECODING_ERRORS:
            return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def read_stored_size(path: Path) -> tuple[int, int]:
    """Height and width of an image file, by its header."""
    with _open_image(path) as image:
        return image.height, image.width


def read_image(path: Path, upright: bool = True, white: White = None) -> Image.Image:
    """Decode a file to RGB at its stored size, see `convert_to_rgb`.

    Args:
        path: the image file.
        upright: turn the image by its EXIF orientation, as image viewers do; False keeps the stored rows and columns
            (except in TIFF files, which Pillow always turns).
        white: see `convert_to_rgb`.

    Raises:
        CorruptImage: if the bytes cannot be decoded, or the brightest possible value is unknown.
    """
    return _as_upright_rgb(path, decode(path), upright, white)


def _as_upright_rgb(name: str | Path, image: Image.Image, upright: bool = True, white: White = None) -> Image.Image:
    if upright:
        turn_upright(image)
    try:
        return convert_to_rgb(image, white)
    except DECODING_ERRORS as error:  # also InputError
        raise CorruptImage(f"{name}: {error}", *getattr(error, "settings", ())) from error


def turn_upright(image: Image.Image) -> None:
    """Turn a decoded image in place by its EXIF orientation. With broken metadata, it stays as it is."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except DECODING_ERRORS:
        return


def scale_size(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Both sides of an image whose short side is scaled to `short_side` pixels; the long one is rounded down."""
    first, second = (side * short_side // min(size) for side in size)
    return first, second
