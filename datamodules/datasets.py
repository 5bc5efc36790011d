"""Torch data sets of image files, with or without labels and places of objects."""

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.fingerprints import digest
from datamodules.truth import Crop, Truth
from explainers.errors import InputError, check_distinct
from explainers.images.decoding import CorruptImage, read_image
from explainers.images.listing import existing_folder, list_images
from explainers.images.transform import ImageTransform
from explainers.saved.files import file_hashes, printable

Sample = dict[str, Tensor | int]
File = TypeVar("File")

TENTH = 10
"""Of a folder without subfolders for the splits, one image in so many is for validation."""


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


def choose_transform(transform: ImageTransform, crop_fraction: float | None) -> ImageTransform:
    """The transform of a data set: the target's own, or middle crops.

    Args:
        transform: the target's own.
        crop_fraction: fraction of the height and width that the crop keeps, above 0 and at most 1; `None` takes
            `transform`.
    """
    if crop_fraction is None:
        return transform
    return ImageTransform(transform.size, crop_pct=crop_fraction, rounds=False)  # rounded down as in FFCV


class Reading(TypedDict, total=False):
    """How a list of image files becomes samples; see `ImageFiles`."""

    crop_fraction: float | None
    limit: int | None
    skip_corrupt: bool


class ImageFiles(Dataset[Sample | None]):
    """Image files, as a model sees them.

    Images are turned upright by their EXIF orientation, as image viewers do. Images with boxes keep their stored rows
    and columns, in whose pixels boxes are.

    Args:
        paths: file of every sample.
        labels: class index of every sample; -1 if unknown.
        transform: how images become samples of H × W pixels.
        classes: class names in the order of their labels; empty if the classes have no names.
        truth: where the objects are in the images of `paths`; each sample then has a `truth` mask.
        crop_fraction: see `choose_transform`.
        limit: maximum number of samples, spread evenly over `paths`; `None` takes all.
        skip_corrupt: for an image that cannot be decoded, warn, return None and mark it in `corrupt`, instead of
            raising an error.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        labels: Sequence[int],
        transform: ImageTransform,
        classes: Sequence[str] = (),
        truth: Truth | None = None,
        crop_fraction: float | None = None,
        limit: int | None = None,
        skip_corrupt: bool = False,
    ) -> None:
        self.transform = choose_transform(transform, crop_fraction)
        self.positions = spread(len(paths), limit)
        # An array: reading a string of a list updates its reference count, so every loader process would copy the list
        self._paths = np.array([os.fsencode(paths[i]) for i in self.positions], dtype=np.bytes_)
        self.labels = torch.tensor([labels[i] for i in self.positions])  # int64, one for each sample
        self.truth = truth
        self.classes = list(classes)
        self.skip_corrupt = skip_corrupt
        self.corrupt = torch.zeros(len(self.positions), dtype=torch.bool).share_memory_()  # loader processes mark them

    def fingerprint(self) -> dict[str, str]:
        """A hash for each entry of the samples: equal for equal contents in the same order; file names do not count."""
        hashes = file_hashes([self.path(index) for index in range(len(self))])
        image = digest(hashes, asdict(self.transform), self.truth is None)  # with boxes, it is not turned
        entries = {"image": image, "label": digest(self.labels.tolist())}
        if self.truth is None:
            return entries
        # The masks depend on the sizes of the stored images too
        return entries | {"truth": digest(image, self.truth.contents(self.positions))}

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> Path:
        return Path(os.fsdecode(self._paths[index]))

    def __getitem__(self, index: int) -> Sample | None:
        try:
            return self._read(index)
        except CorruptImage as error:
            if not self.skip_corrupt:
                raise CorruptImage(f"{error}; repair or delete the file, or set skip_corrupt=true") from error
            self.corrupt[index] = True
            warnings.warn(f"left out: {error}", stacklevel=2)
            return None

    def _read(self, index: int) -> Sample:
        upright = self.truth is None or self.truth.is_upright(self.positions[index], self.path(index))
        stored = read_image(self.path(index), upright)
        image = self.transform(stored)
        sample: Sample = {"image": image, "label": int(self.labels[index]), "index": index}
        if self.truth is not None:
            try:
                crop = Crop((stored.height, stored.width), self.transform)
                sample["truth"] = self.truth.mask(self.positions[index], crop)
            except InputError as error:
                raise type(error)(f"{self.path(index)}: {error}") from error
        return sample


def own_folder(root: str | Path, train: str, val: str, split: str) -> tuple[Path, bool | None]:
    """Find the images of a split, given the names of its subfolder of `root`, and of those for training and validation.

    Returns:
        A folder, and which of its images, see `select_part`.

    Raises:
        InputError: if there is a subfolder for training, and none for validation.
    """
    folders = [Path(root, train).is_dir(), Path(root, val).is_dir()]
    if folders == [True, False]:
        raise InputError(
            f"expected {train}/ and {val}/ in {root}, or neither, got {train}/ alone: add {val}/, or move the images of"
            f" {train}/ up; every tenth file is then for validation"
        )
    return (Path(root, split), None) if any(folders) else (Path(root), split != train)


def select_part(files: Sequence[File], held_out: bool | None, root: str | Path) -> Sequence[File]:
    """Every tenth file, the other ones, or all.

    >>> select_part(range(20), False, "photos")[-3:], select_part(range(3), None, "photos")
    ([16, 17, 18], range(0, 3))

    Args:
        files: the files of all splits, sorted by name.
        held_out: True for the files that are held out for validation, False for the others; `None` for all.
        root: their folder, for messages.
    """
    if held_out is None:
        return files
    tenth = files[TENTH - 1 :: TENTH]
    if not tenth:
        raise InputError(
            f"expected {TENTH} images or more in {root}, of which every tenth is for validation, got {len(files)}: add"
            " images, or divide them into train/ and val/"
        )
    if not held_out:
        return [file for number, file in enumerate(files, 1) if number % TENTH]
    warnings.warn(
        f"{root} has no train/ and val/: every tenth of its {len(files)} images by name is for validation"
        f" ({len(tenth)})",
        stacklevel=2,
    )
    return tenth


def unlabelled_images(
    roots: Sequence[str] | None,
    transform: ImageTransform,
    exclude: Sequence[str] = (),
    root: str | None = None,
    split: str = "train",
    **reading: Unpack[Reading],
) -> ImageFiles:
    """All images below the folders `roots`, with label -1: pre-training needs no labels. See `ImageFiles`.

    Args:
        roots: folders, or files of single images.
        exclude: names of folders whose images are left out, such as classes to test on.
        root: folder of the images of all splits in place of `roots`, see `own_folder`.
        split: the split of `root`, train or val.

    Raises:
        InputError: if there is no folder, or no image in them.
    """
    held_out = None
    if root is not None:
        folder, held_out = own_folder(root, "train", "val", split)
        roots = [str(folder)]
    if not roots:
        raise InputError(
            "expected a folder of images, got none: give data.root=my/images, or several as data.train.roots=[...] and"
            " data.val.roots=[...]"
        )
    places = [Path(root) if os.path.isfile(root) else existing_folder(root, "of images") for root in roots]
    check_distinct(roots=[str(place.resolve()) for place in places])
    files = [path for paths in list_images(places) for path in paths]
    unknown = sorted(set(exclude) - {path.parent.name for path in files})
    if unknown:
        raise InputError(f"expected names of folders with images in exclude, got {', '.join(unknown)}")
    paths = [path for path in files if path.parent.name not in exclude]
    if not paths:
        raise InputError(f"expected images below {', '.join(map(str, roots))}, got none; correct the folders")
    paths = list(select_part(paths, held_out, root or ""))
    return ImageFiles(paths, [-1] * len(paths), transform, **reading)


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises an InputError that names the file if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"expected a JSON file {path}, got {error}; correct the path or the file") from error


def check_below(folder: Path, paths: Sequence[Path], source: Path) -> None:
    """Raise an InputError for a file outside the folder, by its name or through a link.

    The data set of `source`, the file that names them, could otherwise show any image file of this machine.
    """
    real = os.path.realpath(folder)
    for path in paths:
        if "\0" in str(path) or not Path(os.path.realpath(path)).is_relative_to(real):
            raise InputError(
                f"{source}: expected files below {folder}, got {printable(str(path))}, which is or leads elsewhere:"
                " correct the name, or copy the file into the folder"
            )
