"""Images as torch data sets: class folders, loose files, images with boxes."""

import hashlib
import json
import os
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

from explainers.errors import InputError

Sample = dict[str, Tensor | int]
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")


class CorruptImage(InputError):
    """A file that should hold an image and cannot be decoded."""


def as_rgb(image: Image.Image) -> Image.Image:
    """Three channels of 8 bits: grey is repeated, transparency is left out, and of 16 bits the high byte stays."""
    if image.mode.startswith(("I", "F")):  # more than 8 bits, which Pillow would cut off at 255
        pixels = np.asarray(image)
        if image.mode == "F" or pixels.min() < 0 or pixels.max() >= 2**16:
            raise InputError(
                f"expected 8 or 16 bits a channel, got mode {image.mode}, {pixels.min()} to {pixels.max()}"
            )
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    return image.convert("RGB")


def read_image(path: Path) -> Image.Image:
    """Decode a file to RGB, at its own size; whatever its mode, see `as_rgb`."""
    try:
        with Image.open(path) as image:
            return as_rgb(image)
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, the permissions or too many open files: nothing is known about the image
        raise CorruptImage(
            f"{path}: expected an image, got {path.stat().st_size} bytes that cannot be decoded ({error});"
            " repair or delete the file, or set skip_corrupt=true"
        ) from error


def resize_short_side(image: Image.Image, size: int) -> Image.Image:
    """Scale to a short side of `size`, bicubic and antialiased; the aspect ratio stays."""
    width, height = (side * size // min(image.size) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def box_mask(boxes: Sequence[Box], size: int, scale: tuple[float, float], offset: tuple[int, int]) -> Tensor:
    """Boolean, (S, S): the pixels of a resized and cropped image whose centres lie in one of the boxes.

    The boxes are in pixels of the stored image, `scale` is resized by stored (height, width), `offset` is the crop's
    (row, column) in the resized image.
    """
    mask = torch.zeros(size, size, dtype=torch.bool)
    row, column = (torch.arange(size) + 0.5 + start for start in offset)
    for left, top, right, bottom in boxes:
        inside_rows = (row >= top * scale[0]) & (row < bottom * scale[0])
        inside_columns = (column >= left * scale[1]) & (column < right * scale[1])
        mask |= inside_rows[:, None] & inside_columns
    return mask


def spread(length: int, limit: int | None) -> list[int]:
    """`limit` positions spread evenly over `length`, so that a list sorted by class stays balanced; all, if fewer."""
    if limit is None or limit >= length:
        return list(range(length))
    if limit < 1:
        raise InputError(f"expected limit to be at least 1 image, got {limit}; leave it out for all images")
    return [i * length // limit for i in range(limit)]


class ImageFiles(Dataset[Sample | None]):
    """Image files, their short side scaled to image_size / crop_fraction, their centre cropped.

    Args:
        paths, labels: of every sample.
        image_size: S.
        classes: the names of the classes, in the order of their labels; empty where they have none.
        boxes: the boxes that hold the object, per sample; gives the samples a `truth`.
        crop_fraction: the part of the short side that the crop keeps.
        limit: at most so many samples, spread evenly over the list.
        skip_corrupt: give None for an image that cannot be decoded, and a warning; otherwise it is an error.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        labels: Sequence[int],
        image_size: int,
        classes: Sequence[str] = (),
        boxes: Sequence[Sequence[Box]] | None = None,
        crop_fraction: float = 0.875,
        limit: int | None = None,
        skip_corrupt: bool = False,
    ) -> None:
        if not 0 < crop_fraction <= 1:
            raise InputError(f"expected crop_fraction to be above 0 and at most 1, got {crop_fraction}")
        chosen = spread(len(paths), limit)
        # Arrays, because every loader process would copy a list of a million strings: reading one counts a reference
        self._paths = np.array([os.fsencode(paths[i]) for i in chosen], dtype=np.bytes_)
        self.labels = torch.tensor([labels[i] for i in chosen])  # int64, (N,)
        self.boxes = None if boxes is None else [boxes[i] for i in chosen]
        self.classes, self.skip_corrupt = list(classes), skip_corrupt
        self.image_size, self.short_side = image_size, round(image_size / crop_fraction)

    def fingerprint(self) -> str:
        """Equal for equal images: a hash of the files' names and sizes, and what is cut out of them."""
        paths = [self.path(index) for index in range(len(self))]
        listing = [("/".join(path.parts[-3:]), path.stat().st_size) for path in paths]
        return hashlib.sha256(repr((listing, self.image_size, self.short_side)).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> Path:
        return Path(os.fsdecode(self._paths[index]))

    def __getitem__(self, index: int) -> Sample | None:
        try:
            stored = read_image(self.path(index))
        except CorruptImage as error:
            if not self.skip_corrupt:
                raise
            warnings.warn(f"left out: {error}", stacklevel=2)
            return None
        resized = resize_short_side(stored, self.short_side)
        # Rounded down, as FFCV does
        row, column = (resized.height - self.image_size) // 2, (resized.width - self.image_size) // 2
        crop = resized.crop((column, row, column + self.image_size, row + self.image_size))
        sample: Sample = {"image": pil_to_tensor(crop).contiguous(), "label": int(self.labels[index]), "index": index}
        if self.boxes is not None:
            scale = (resized.height / stored.height, resized.width / stored.width)
            sample["truth"] = box_mask(self.boxes[index], self.image_size, scale, (row, column))
        return sample


def list_images(root: Path) -> list[Path]:
    """All images below a folder, sorted by name, folder by folder; not hidden ones (macOS leaves ._image1.png)."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders.sort()
        names = sorted(name for name in files if name.lower().endswith(EXTENSIONS) and not name.startswith("."))
        found += [Path(folder, name) for name in names]
    return found


def existing_folder(root: str | Path, expected: str) -> Path:
    """The folder, or an error that says what it should hold."""
    if not Path(root).is_dir():
        raise InputError(f"expected a folder {expected}, got {root}, which is not a folder; correct the path")
    return Path(root)


def unlabelled_images(
    roots: Sequence[str],
    image_size: int,
    crop_fraction: float = 0.875,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> ImageFiles:
    """All images below the folders, labelled -1: pre-training needs no classes."""
    paths = [path for root in roots for path in list_images(existing_folder(root, "of images"))]
    if not paths:
        raise InputError(f"expected images below {', '.join(map(str, roots))}, got none; correct the folders")
    return ImageFiles(paths, [-1] * len(paths), image_size, (), None, crop_fraction, limit, skip_corrupt)


def annotated_images(
    root: str | Path,
    image_size: int,
    annotations: str = "annotations.json",
    classes: str | None = None,
    crop_fraction: float = 0.875,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> ImageFiles:
    """Images whose objects are boxed: every sample has a `truth`.

    Args:
        root: the folder that all names are relative to.
        annotations: a JSON list of {"file": name, "label": class, "boxes_xyxy": [[left, top, right, bottom], ...]}, in
            pixels of the stored image.
        classes: a JSON file whose "wnids" are the names of the classes; left out, they have none.
        image_size, crop_fraction, limit, skip_corrupt: see ImageFiles.
    """
    folder = existing_folder(root, f"with {annotations}")
    rows = read_json(folder / annotations)
    try:
        paths = [folder / row["file"] for row in rows]
        labels = [int(row["label"]) for row in rows]
        boxes = [[(float(x0), float(y0), float(x1), float(y1)) for x0, y0, x1, y1 in row["boxes_xyxy"]] for row in rows]
        if not rows:
            raise InputError("an empty list")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f'{folder / annotations}: expected a list of {{"file": name, "label": class, "boxes_xyxy": [[left, top,'
            f" right, bottom], ...]}}, got something else ({error!r}); correct the file"
        ) from error
    names = read_json(folder / classes)["wnids"] if classes else ()
    return ImageFiles(paths, labels, image_size, names, boxes, crop_fraction, limit, skip_corrupt)


def read_json(path: Path) -> Any:
    """The content of a JSON file, or an error that names it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"expected a JSON file {path}, got {error}; correct the path or the file") from error
