"""Images as people have them: files, folders, PIL images, arrays and tensors become what a model sees."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from explainers.errors import InputError
from explainers.images.bands import ARRAYS, PixelFormat, see_pixels
from explainers.images.decoding import CorruptImage, turn_upright
from explainers.images.listing import endings, list_images, several
from explainers.images.transform import Box, ImageTransform
from explainers.runtime.progress import is_watched, progress, watching
from explainers.saved.files import printable

OneImage = str | Path | Image.Image | np.ndarray | Tensor
"""One image, for type checkers; a path may also name a folder, and an array or a tensor hold a batch."""

Images = OneImage | Iterable[OneImage]


@dataclass(frozen=True)
class Photo:
    """An image that is decoded when it is needed.

    Args:
        name: name of its file, relative to the folder that was given; or its number.
        decode: reads the pixels, and converts them to a format, see `PixelFormat.convert`.
        in_folder: whether it was found in a folder, so that it is left out if it cannot be decoded.
        file: its file, if it has one.
        box: where in the photo the model's image is; `None` before it is decoded.
    """

    name: str
    decode: Callable[[PixelFormat], Image.Image | np.ndarray]
    in_folder: bool = False
    file: Path | None = None
    box: Box | None = None


def list_photos(images: Images) -> list[Photo]:
    """List the images that a caller means, without decoding a file.

    Args:
        images: a path, a folder (with all folders below it), a PIL image, pixels as an array or a tensor, (H, W),
            (H, W, C), (C, H, W) or a batch of them; or a list.

    Raises:
        InputError: for anything else, a missing file, or no image at all.
    """
    photos: list[Photo] = []
    for each in [images] if isinstance(images, OneImage) or not isinstance(images, Iterable) else images:
        photos += _list_entry(each, len(photos))
    if not photos:
        raise InputError(f"expected at least one image, got an empty {type(images).__name__}")
    return photos


def is_single(images: Images) -> bool:
    """Whether a caller gave one image, and no folder, list or batch.

    >>> is_single("photo.jpg"), is_single(["photo.jpg"]), is_single("."), is_single(np.zeros((2, 8, 8, 3)))
    (True, False, False, False)
    """
    if isinstance(images, str | Path):
        return not os.path.isdir(os.path.expanduser(images))
    return isinstance(images, Image.Image) or isinstance(images, Tensor | np.ndarray) and images.ndim <= 3


def _list_entry(image: Any, number: int) -> list[Photo]:
    """The photos of one entry of a list; `number` is the position of the first one."""
    if isinstance(image, str | Path):
        return _list_path(image)
    if isinstance(image, Image.Image):
        name = printable(Path(getattr(image, "filename", "") or f"image {number}").name)
        return [Photo(name, partial(_convert, image, name))]
    if isinstance(image, Tensor):
        image = _read_tensor(image)
    if not isinstance(image, np.ndarray):
        kinds = "a path, a folder, a PIL image, an array, a tensor, or a list of them"
        raise InputError(f"expected {kinds}, got {type(image).__name__}")
    if not 2 <= image.ndim <= 4:
        raise InputError(f"expected pixels (H, W), (H, W, C) or (C, H, W), or a batch of them, got {list(image.shape)}")
    names = [f"image {number + i}" for i in range(len(image) if image.ndim == 4 else 1)]
    pixels = image if image.ndim == 4 else image[None]
    return [Photo(name, partial(_convert, each, name)) for name, each in zip(names, pixels, strict=True)]


def _read_tensor(pixels: Tensor) -> np.ndarray:
    """The values of a tensor; an InputError for one that has none, is sparse, quantised or nested."""
    try:
        plain = pixels.detach().to("cpu", torch.float32 if pixels.is_floating_point() else pixels.dtype)
        array: np.ndarray = plain.resolve_conj().resolve_neg().numpy()
    except (RuntimeError, TypeError) as error:  # also NotImplementedError
        kind = f"{pixels.dtype} on {pixels.device}, {pixels.layout}"
        raise InputError(f"expected an image as a dense tensor of numbers, got {kind}: convert it") from error
    return array


def _list_path(given: str | Path) -> list[Photo]:
    """The file at a path, or all images below a folder."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(given)):
        raise InputError(f"expected a file, got a URL: download it first ({given})")
    path = Path(os.path.expanduser(given))
    if os.path.isfile(path):  # Path.is_file raises an error for a text that is too long for a name
        if path.suffix.lower() in (".heic", ".heif") and path.suffix.lower() not in endings():  # photos of phones
            raise InputError(f"expected a kind of image that Pillow reads, got {path.name}: pip install pillow-heif")
        return [Photo(printable(path.name), partial(_read, path), file=path)]
    if not os.path.isdir(path) or not str(given):
        is_there = str(given) and os.path.lexists(path)
        reason = "it is a pipe, socket or device, or a link that leads nowhere" if is_there else "there is no such file"
        raise InputError(f"expected an image file or a folder, got {str(given)[:200]!r}: {reason}")
    (files,) = list_images([path], ARRAYS)
    if not files:
        raise InputError(f"expected images below {path}, got none: give another folder")
    return [
        Photo(printable(file.relative_to(path).as_posix()), partial(_read, file), in_folder=True, file=file)
        for file in files
    ]


def _read(path: Path, form: PixelFormat) -> Image.Image | np.ndarray:
    try:
        return form.read_file(path)
    except OSError as error:  # of the disk or the permissions
        raise InputError(f"expected an image that can be read, got {path}: {error.strerror}") from error


def _convert(image: Image.Image | np.ndarray, name: str, form: PixelFormat) -> Image.Image | np.ndarray:
    """Convert an array, or an upright copy of a PIL image."""
    if isinstance(image, np.ndarray):
        return form.convert(image, name)
    try:
        copy = image.copy()
        turn_upright(copy)
        return form.convert(copy, name)
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError) as error:  # it is decoded at its first use
        raise CorruptImage(f"expected an image, got {name}, which cannot be decoded ({error})") from error


def decode_seen(
    photo: Photo, transform: ImageTransform, form: PixelFormat, broken: list[tuple[Path, InputError]] | None = None
) -> tuple[Tensor, Box] | None:
    """Decode what a model sees of a photo, uint8 or uint16 (C, H, W), and where in the photo it is.

    For a file that cannot be read or decoded, it returns `None` if it was found in a folder, and adds its name and the
    error to `broken`; it raises the error if it was named.
    """
    try:
        image = photo.decode(form)
    except InputError as error:
        if photo.in_folder:
            if broken is not None:
                broken.append((Path(photo.name), error))
            return None
        if isinstance(error, CorruptImage):
            raise CorruptImage(f"{error}: give another file", *error.settings) from error
        raise
    return see_pixels(image, transform)


def decode_photos(photos: Sequence[Photo], transform: ImageTransform, form: PixelFormat) -> tuple[list[Photo], Tensor]:
    """Decode what a model sees of photos, none of which is left out: the photos with `box`, pixels (B, C, H, W)."""
    named = [replace(photo, in_folder=False) for photo in photos]
    placed, pixels, _ = decode_part(named, range(len(named)), transform, form)
    return placed, torch.stack(pixels)


def decode_part(
    photos: Sequence[Photo],
    part: range,
    transform: ImageTransform,
    form: PixelFormat,
    broken: list[tuple[Path, InputError]] | None = None,
) -> tuple[list[Photo], list[Tensor], list[int]]:
    """Decode what a model sees of some photos: those that are not `broken`, pixels (C, H, W), and their numbers."""
    seen = {number: decode_seen(photos[number], transform, form, broken) for number in part}
    kept = {number: found for number, found in seen.items() if found is not None}
    placed = [replace(photos[number], box=box) for number, (_, box) in kept.items()]
    return placed, [pixels for pixels, _ in kept.values()], [*kept]


def decode_batches(
    photos: Sequence[Photo],
    transform: ImageTransform,
    form: PixelFormat,
    batch: int,
    doing: str = "explaining",
    passes: int = 1,
) -> Iterator[tuple[list[Photo], Tensor, list[int]]]:
    """Decode what a model sees of photos, in batches: photos, pixels (B, C, H, W), and their numbers among all.

    Broken files of folders are left out with a warning. A progress bar, labelled `doing`, appears after two seconds; it
    also counts the `passes` that the caller makes for each photo.
    """
    broken: list[tuple[Path, InputError]] = []
    with (
        progress(doing, len(photos), "image", 0.0, shown=not is_watched(), delay=2) as bar,
        watching(lambda made: bar.update(min(made / passes, len(photos) - bar.n))),
    ):
        for start in range(0, len(photos), batch):
            part = range(start, min(start + batch, len(photos)))
            placed, pixels, numbers = decode_part(photos, part, transform, form, broken)
            if numbers:
                yield placed, torch.stack(pixels), numbers
            bar.update(part.stop - bar.n)
    if broken:
        files, (_, reason) = f"{several([name for name, _ in broken])} that cannot be decoded", broken[0]
        if len(broken) == len(photos):
            raise InputError(f"expected images, got {files}: give another folder ({reason})")
        warnings.warn(f"left out: {files}, of {len(photos)} images ({reason})", stacklevel=2)
