"""Images of any number of channels and bits: what becomes of them for a model, and for pictures."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from explainers.errors import InputError
from explainers.images.decoding import (
    DECODING_ERRORS,
    CorruptImage,
    White,
    convert_to_rgb,
    decode,
    read_image,
    scale_to_16_bits,
    turn_upright,
)
from explainers.images.transform import Box, ImageTransform

ARRAYS = frozenset({".npy"})
"""Endings of files of arrays, which are read beside image files."""

TIFF = frozenset({".tif", ".tiff"})
COLOURS = (3, 4)


@dataclass(frozen=True)
class PixelFormat:
    """The channels that a model takes, and what the values of its images mean.

    Photos become RGB for a model of 3 channels, and grey for one of 1. A model of other channels takes bands.

    Args:
        channels: C.
        white: see `scale_to_16_bits`; `None` if it is not known. Images of 8 bits, uint8, need none.
        bands: three of the channels, numbered from 0, that pictures show as red, green and blue; `None` for the first.

    Raises:
        InputError: for values that are no such numbers.
    """

    channels: int = 3
    white: White = None
    bands: Sequence[int] | None = None

    def __post_init__(self) -> None:
        black, white = (0, self.white) if not isinstance(self.white, tuple | list) else self.white
        if white is not None and not black < white:
            wanted = "a value above black's, such as white=4095 or white=(-1, 1)"
            raise InputError(f"white={self.white}: expected {wanted}", "white")
        if self.bands is not None and self.channels <= len(COLOURS) + 1:
            raise InputError(f"bands={self.bands}: the model has {self.channels} channels: leave it out", "bands")
        if self.bands is not None and (len(self.bands) != 3 or not set(self.bands) <= set(range(self.channels))):
            raise InputError(f"bands={self.bands}: expected three numbers from 0 to {self.channels - 1}", "bands")

    def read_file(self, path: Path) -> Image.Image | np.ndarray:
        """Read an image file or an array, see `convert`; a CorruptImage if it cannot be decoded."""
        array = read_array(path) if path.suffix.lower() in ARRAYS else None
        if array is None and self.channels not in (1, 3) and path.suffix.lower() in TIFF:
            array = read_tiff(path)
        if array is None:
            if self.channels == 3:
                return read_image(path, white=self.white)
            image = decode(path)
            turn_upright(image)
            return self.convert(image, path.name)
        return self.convert(array, path.name)

    def convert(self, image: Image.Image | np.ndarray, name: str) -> Image.Image | np.ndarray:
        """Convert an upright image to RGB for 3 channels, otherwise to bands (H, W, C) of uint8 or uint16.

        Args:
            image: of any mode; or an array (H, W), (H, W, C) or (C, H, W).
            name: what messages call it.

        Raises:
            InputError: for another number of channels, and for values whose meaning is not stated.
        """
        if isinstance(image, Image.Image):
            if self.channels == 3:
                return convert_to_rgb(image, self.white)
            deep = image.mode.startswith(("I", "F"))
            if self.channels == 1 and not deep:
                if image.mode not in ("1", "L", "LA"):
                    warnings.warn("colours become grey, because the model takes 1 channel", stacklevel=2)
                return np.asarray(convert_to_rgb(image).convert("L"))[..., None]
            image = np.asarray(image)
        if self.channels in (1, 3) and _count_channels(image) in COLOURS:
            return self.convert(to_pillow(image, self.white), name)
        if self.channels == 3:
            return convert_to_rgb(to_pillow(image, self.white), self.white)
        bands = find_bands(image, self.channels, name)
        return bands if bands.dtype == np.uint8 else scale_to_16_bits(bands, self.white)

    def draw(self, image: Image.Image | np.ndarray) -> Image.Image:
        """Draw an image that `convert` returns: RGB."""
        return image if isinstance(image, Image.Image) else Image.fromarray(self._show(image))

    def draw_seen(self, pixels: Tensor) -> Tensor:
        """Draw what a model sees, (C, H, W) of uint8 or uint16: uint8 (3, H, W), the same tensor for 3 channels."""
        if self.channels == 3:
            return pixels
        return torch.from_numpy(self._show(pixels.permute(1, 2, 0).numpy())).permute(2, 0, 1).contiguous()

    def _show(self, bands: np.ndarray) -> np.ndarray:
        chosen = self.bands or [min(band, self.channels - 1) for band in range(3)]
        shown = bands[..., list(chosen)]
        return shown if shown.dtype == np.uint8 else (shown >> 8).astype(np.uint8)


def see_pixels(image: Image.Image | np.ndarray, transform: ImageTransform) -> tuple[Tensor, Box]:
    """Return what a model sees of an image that `PixelFormat.convert` returns, (C, H, W), and where in it that is.

    Bands are resized one by one, those of 16 bits as floats, with values beside the image of 257 times `fill`.
    """
    if isinstance(image, Image.Image):
        return transform(image), transform.box(*image.size)
    rows, columns, count = image.shape
    single = image if image.dtype == np.uint8 else image.astype(np.float32)
    fills = np.resize(transform.fill, count) * (1 if image.dtype == np.uint8 else 257)
    seen = [
        replace(transform, fill=(int(fill),))(Image.fromarray(np.ascontiguousarray(single[..., band])))
        for band, fill in enumerate(fills)
    ]
    pixels = torch.cat(seen).numpy()
    if image.dtype != np.uint8:  # bicubic filters overshoot
        pixels = pixels.clip(0, 65535).round().astype(np.uint16)
    return torch.from_numpy(pixels), transform.box(columns, rows)


def find_bands(pixels: np.ndarray, channels: int, name: str) -> np.ndarray:
    """Return an array (H, W, C) or (C, H, W) of C `channels`, or (H, W) of one, as (H, W, C).

    >>> find_bands(np.zeros((6, 20, 30)), 6, "stack").shape
    (20, 30, 6)
    """
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim == 3 and pixels.size:
        if pixels.shape[2] == channels:
            return pixels
        if pixels.shape[0] == channels:
            return pixels.transpose(1, 2, 0)
    raise InputError(
        f"expected the {channels} channels that the model takes, got {name} of shape {list(pixels.shape)}: give its"
        f" bands as an array (H, W, {channels}) or ({channels}, H, W), a .npy file or a GeoTIFF"
    )


def to_pillow(pixels: np.ndarray, white: White = None) -> Image.Image:
    """Turn an array (H, W), (H, W, C) or (C, H, W) of uint8, or with a stated white of any numbers, into a PIL image.

    Raises:
        InputError: for other shapes, and other numbers than uint8, or grey uint16, without `white`.
    """
    shape, count = list(pixels.shape), _count_channels(pixels)
    if not count or not pixels.size:
        raise InputError(
            f"expected an image of shape (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels, got {shape}"
        )
    if pixels.ndim == 3 and shape[2] != count:
        pixels = pixels.transpose(1, 2, 0)
    if count == 1:
        pixels = pixels.reshape(pixels.shape[:2])
    if pixels.dtype == np.uint16 and pixels.ndim == 2:
        return Image.fromarray(pixels)
    if pixels.dtype != np.uint8:
        if white is None:
            raise InputError(
                f"expected uint8 pixels from 0 to 255, got {pixels.dtype}: give the model white=1 if they are from"
                " 0 to 1, or the value of white, such as white=4095",
                "white",
            )
        pixels = (scale_to_16_bits(pixels, white) >> 8).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(pixels))


def _count_channels(pixels: np.ndarray) -> int:
    """The channels of an array that may be a photo, 1, 3 or 4; 0 for others."""
    if pixels.ndim == 2:
        return 1
    return next((count for count in (pixels.shape[-1], pixels.shape[0]) if count in (1, *COLOURS)), 0) * (
        pixels.ndim == 3
    )


def read_array(path: Path) -> np.ndarray:
    """Read a .npy file; a CorruptImage if it is none, or one whose header claims more than the file holds."""
    try:
        array = np.array(np.lib.format.open_memmap(path, mode="r"))
        if array.dtype.kind not in "buif":
            raise TypeError(f"of type {array.dtype}")
    except OSError:
        raise  # an error of the disk, the permissions or the open files
    except Exception as error:  # numpy raises many kinds for a damaged header
        reason = " ".join(str(error).split())[:200]
        raise CorruptImage(f"{path}: expected an array of numbers, got one that cannot be read ({reason})") from error
    return array


def read_tiff(path: Path) -> np.ndarray:
    """Read all bands of a TIFF file, which Pillow does not; a CorruptImage if that fails."""
    try:
        import tifffile
    except ImportError as error:
        raise InputError(
            f"expected tifffile for the bands of {path.name}: pip install tifffile, or give a .npy file"
        ) from error
    try:
        array: np.ndarray = tifffile.imread(path)
    except (*DECODING_ERRORS, tifffile.TiffFileError) as error:
        raise CorruptImage(f"{path}: expected a TIFF file, got one that cannot be decoded ({error})") from error
    return array
