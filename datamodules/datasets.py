"""Torch data sets of image files, with or without labels and object boxes."""

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

from datamodules.decoding import CorruptImage, read_image, resize_short_side
from datamodules.fingerprints import digest
from datamodules.listing import existing_folder, list_images
from explainers.errors import InputError, check_distinct, check_positive
from explainers.saved.files import file_hashes

Sample = dict[str, Tensor | int]
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


def box_mask(boxes: Sequence[Box], size: int, scale: tuple[float, float], offset: tuple[int, int]) -> Tensor:
    """Mark the pixels of a resized and cropped image whose centres lie in one of the boxes: boolean (H, W).

    Args:
        boxes: boxes, in pixels of the stored image.
        size: H and W, the side of the crop, in pixels.
        scale: size of the resized image divided by that of the stored image, (height, width).
        offset: first (row, column) of the crop in the resized image.

    >>> box_mask([(2, 0, 6, 2)], size=3, scale=(0.5, 0.5), offset=(0, 0)).int().tolist()  # columns 1 and 2 of row 0
    [[0, 1, 1], [0, 0, 0], [0, 0, 0]]
    """
    mask = torch.zeros(size, size, dtype=torch.bool)
    row, column = (torch.arange(size) + 0.5 + start for start in offset)
    for left, top, right, bottom in boxes:
        inside_rows = (row >= top * scale[0]) & (row < bottom * scale[0])
        inside_columns = (column >= left * scale[1]) & (column < right * scale[1])
        mask |= inside_rows[:, None] & inside_columns
    return mask


def spread(length: int, limit: int | None) -> list[int]:
    """At most `limit` of `length` positions, evenly spaced, so that a list sorted by class stays balanced.

    >>> spread(10, limit=4)
    [0, 2, 5, 7]
    """
    if limit is None or limit >= length:
        return list(range(length))
    if limit < 1:
        raise InputError(f"expected a limit of at least 1 image, got {limit}; leave it out for all images")
    return [i * length // limit for i in range(limit)]


def check_crop(image_size: int, crop_fraction: float) -> None:
    """Raise an InputError unless the crop has pixels, and keeps at most the whole image."""
    check_positive(image_size=image_size)
    if not 0 < crop_fraction <= 1:
        raise InputError(f"expected crop_fraction to be above 0 and at most 1, got {crop_fraction}")


class ImageFiles(Dataset[Sample | None]):
    """Image files, with the short side scaled to image_size / crop_fraction and the centre cropped.

    Images are turned upright by their EXIF orientation, as image viewers do. Images with boxes keep their stored rows
    and columns, because boxes are in pixels of the stored image.

    Args:
        paths: file of every sample.
        labels: class index of every sample; -1 if unknown.
        image_size: side of the crop, in pixels.
        classes: class names in the order of their labels; empty if the classes have no names.
        boxes: boxes around the objects of every sample; each sample then has a `truth` mask.
        crop_fraction: fraction of the short side that the crop keeps, above 0 and at most 1.
        limit: maximum number of samples, spread evenly over `paths`; `None` takes all.
        skip_corrupt: for an image that cannot be decoded, warn, return None and mark it in `corrupt`, instead of
            raising an error.
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
        check_crop(image_size, crop_fraction)
        chosen = spread(len(paths), limit)
        # An array: reading a string of a list updates its reference count, so every loader process would copy the list
        self._paths = np.array([os.fsencode(paths[i]) for i in chosen], dtype=np.bytes_)
        self.labels = torch.tensor([labels[i] for i in chosen])  # int64, one for each sample
        self.boxes = None if boxes is None else [boxes[i] for i in chosen]
        self.classes = list(classes)
        self.skip_corrupt = skip_corrupt
        self.corrupt = torch.zeros(len(chosen), dtype=torch.bool).share_memory_()  # loader processes mark them
        self.image_size = image_size
        self.short_side = round(image_size / crop_fraction)

    def fingerprint(self) -> dict[str, str]:
        """A hash for each entry of the samples: equal for equal contents in the same order; file names do not count."""
        upright = self.boxes is None
        hashes = file_hashes([self.path(index) for index in range(len(self))])
        image = digest(hashes, self.image_size, self.short_side, upright)
        entries = {"image": image, "label": digest(self.labels.tolist())}
        # The masks of boxes depend on the sizes of the stored images too
        return entries if upright else entries | {"truth": digest(image, self.boxes)}

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> Path:
        return Path(os.fsdecode(self._paths[index]))

    def __getitem__(self, index: int) -> Sample | None:
        try:
            stored = read_image(self.path(index), upright=self.boxes is None)
        except CorruptImage as error:
            if not self.skip_corrupt:
                raise CorruptImage(f"{error}; repair or delete the file, or set skip_corrupt=true") from error
            self.corrupt[index] = True
            warnings.warn(f"left out: {error}", stacklevel=2)
            return None
        resized = resize_short_side(stored, self.short_side)
        row = (resized.height - self.image_size) // 2  # rounded down, as in FFCV
        column = (resized.width - self.image_size) // 2
        crop = resized.crop((column, row, column + self.image_size, row + self.image_size))
        sample: Sample = {"image": pil_to_tensor(crop).contiguous(), "label": int(self.labels[index]), "index": index}
        if self.boxes is not None:
            scale = (resized.height / stored.height, resized.width / stored.width)
            sample["truth"] = box_mask(self.boxes[index], self.image_size, scale, (row, column))
        return sample


def unlabelled_images(
    roots: Sequence[str],
    image_size: int,
    crop_fraction: float = 0.875,
    limit: int | None = None,
    skip_corrupt: bool = False,
    exclude: Sequence[str] = (),
) -> ImageFiles:
    """All images below the folders `roots`, with label -1: pre-training needs no labels. See `ImageFiles`.

    Args:
        roots: folders, or files of single images.
        exclude: names of folders whose images are left out, such as classes to test on.
    """
    places = [Path(root) if os.path.isfile(root) else existing_folder(root, "of images") for root in roots]
    check_distinct(roots=[str(place.resolve()) for place in places])
    files = [path for paths in list_images(places) for path in paths]
    unknown = sorted(set(exclude) - {path.parent.name for path in files})
    if unknown:
        raise InputError(f"expected names of folders with images in exclude, got {', '.join(unknown)}")
    paths = [path for path in files if path.parent.name not in exclude]
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
    """Images with annotated object boxes: every sample has a `truth` mask. For other arguments see `ImageFiles`.

    Args:
        root: folder to which all file names are relative.
        annotations: JSON file with a list of {"file": name, "label": class index, "boxes_xyxy": [[left, top, right,
            bottom], ...]}; boxes are in pixels of the stored image.
        classes: JSON file whose "wnids" are the class names; `None` leaves the classes without names.
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
    """The content of a JSON file; raises an InputError that names the file if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"expected a JSON file {path}, got {error}; correct the path or the file") from error
