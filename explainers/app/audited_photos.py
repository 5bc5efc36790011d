"""The photos of an audit: their classes by folder, the masks of their objects, and their pixels."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.app.photos import Photo, decode_part, list_photos
from explainers.app.session import Session
from explainers.auditing.store import Source
from explainers.errors import InputError
from explainers.images.bands import see_pixels
from explainers.images.decoding import CorruptImage
from explainers.images.listing import several
from explainers.images.masks import MaskValue, find_ranges, read_mask
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.names import class_index, class_names, find_image_classes, match_classes
from explainers.runtime.progress import progress

Labels = Literal["folder"] | Sequence[int | str] | Mapping[str, int | str] | None
"""Classes of images: the folders that they are in, one for each in the order of their names, or name → class."""


class Pictures(Mapping[int, Tensor]):
    """Number of a photo → what the model sees of it, as pictures show it, uint8 (3, H, W), decoded when it is asked."""

    def __init__(self, session: Session, photos: Sequence[Photo]) -> None:
        self.session = session
        self.photos = photos

    def __getitem__(self, number: int) -> Tensor:
        return self.session.pixels.draw_seen(read_pixels(self.session, self.photos, [number])[0])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.photos)))

    def __len__(self) -> int:
        return len(self.photos)


def read_pixels(session: Session, photos: Sequence[Photo], numbers: Sequence[int]) -> Tensor:
    """Decode what the model sees of some photos, by their numbers: (B, C, H, W)."""
    return session.decode([photos[number] for number in numbers])[1]


def list_folder(folder: str | Path) -> list[Photo]:
    """List the photos below a folder; an InputError for a file, or without any."""
    if Path(folder).expanduser().is_file():
        raise InputError(f"{folder}: expected a folder of images, got a file: give its folder")
    return list_photos(Path(folder))


def make_source(session: Session, photos: Sequence[Photo], labels: Tensor) -> Source:
    """The photos as evidence is collected of them."""

    def batches(numbers: range) -> Iterator[tuple[Tensor, Sequence[int]]]:
        for start in range(numbers.start, numbers.stop, session.batch_size):
            part = range(start, min(start + session.batch_size, numbers.stop))
            _, pixels, kept = decode_part(photos, part, session.transform, session.pixels)
            if kept:
                yield torch.stack(pixels), kept

    files = [photo.file for photo in photos if photo.file]
    return Source([photo.name for photo in photos], labels.tolist(), files, batches)


def find_labels(labels: Labels, photos: Sequence[Photo], target: TargetModel) -> Tensor:
    """Find the class of each photo of a folder; −1 where it is not known, (images,).

    Args:
        labels: `folder`: the first folder in the name of a photo is its class, see `match_folders`. Or a class for each
            photo, by name or index, in a list in the order of their names, or by their names. `None`: not known.
        photos: those of one folder.

    Raises:
        InputError: for folders, names or numbers that are no class of the model, and a list of another length.
    """
    if labels is None:
        return torch.full((len(photos),), -1)
    if labels == "folder":
        return _find_folder_labels(photos, target)
    if isinstance(labels, str):
        raise InputError(f'labels={labels!r}: expected "folder", or a class for each image')
    names = class_names(target)
    if isinstance(labels, Mapping):
        known = {name: class_index(each, names, "labels") for name, each in labels.items()}
        return torch.tensor([known.get(photo.name, -1) for photo in photos])
    return torch.tensor(find_image_classes(labels, names, len(photos), "labels"))


def _find_folder_labels(photos: Sequence[Photo], target: TargetModel) -> Tensor:
    folders = [photo.name.rpartition("/")[0].partition("/")[0] for photo in photos]
    names = sorted(set(folders) - {""})
    if not names:
        raise InputError(
            f'labels="folder": expected a folder for each class, got {len(photos)} images in one folder: sort them by'
            " class, or leave out the labels"
        )
    indices = dict(zip(names, match_folders(names, target), strict=True)) | {"": -1}
    if "" in folders:
        count = folders.count("")
        beside = f"{count} image{'s' * (count > 1)} beside the folders"
        warnings.warn(f'labels="folder": no labels of {beside} of classes', stacklevel=2)
    if len(names) == 1:
        warnings.warn(
            f'labels="folder": all images are of one class, {names[0]}: what only this class has cannot be told from'
            " what all images have; add folders of other classes",
            stacklevel=2,
        )
    return torch.tensor([indices[folder] for folder in folders])


def match_folders(names: Sequence[str], target: TargetModel) -> list[int]:
    """Find the class that each folder is named after: a readable name, such as `polar_bear`, or see `match_classes`."""
    readable = class_names(target)
    try:
        return [class_index(name, readable) for name in names]
    except InputError:
        pass
    try:
        return match_classes(names, target)
    except InputError as error:
        raise InputError(f'labels="folder": {error}') from error


def find_objects(
    folder: str | Path, photos: Sequence[Photo], session: Session, grid: PatchGrid, mask_value: MaskValue = None
) -> Tensor:
    """Find the patches on the objects of photos: boolean (images, N).

    A mask has the name of its photo, with any ending. A patch is on the object if most of its pixels are. All patches
    of a photo without a mask that can be decoded count as on it, which a warning says.

    Args:
        folder: the masks, see `read_mask`.
        photos: those of one folder.
        session: sees photos, and so their masks.
        mask_value: values of the object, see `MaskValue`.

    Raises:
        InputError: if no photo has a mask, if no mask has an object, or if it is open which values are the object.
    """
    ranges = find_ranges(mask_value)
    listed = list_folder(folder)
    masks = {PurePath(each.name).with_suffix(""): each for each in listed}
    if len(masks) < len(listed):
        twice = [Path(each.name) for each in listed if each not in masks.values()]
        raise InputError(f"{folder}: expected one mask of each name, got two of {several(twice)}: remove one")
    inside = torch.ones(len(photos), grid.num_patches, dtype=torch.bool)
    transform, count = replace(session.transform, fill=(0,)), 0
    without: dict[str, list[Path]] = {"no masks of": [], "masks that cannot be decoded of": []}
    with progress("reading masks", len(photos), "mask", delay=2) as bar:
        for row, photo in zip(inside, photos, strict=True):
            bar.update(1)
            mask = masks.get(PurePath(photo.name).with_suffix(""))
            try:
                pixels = mask and mask.file and read_mask(mask.file, ranges)
            except CorruptImage:
                without["masks that cannot be decoded of"].append(Path(photo.name))
                continue
            if pixels is None:
                without["no masks of"].append(Path(photo.name))
                continue
            count += int(pixels.any())
            row.copy_(mark_patches(see_pixels(pixels[..., None] * np.uint8(255), transform)[0][0], grid))
    said = [f"{reason} {several(paths)}" for reason, paths in without.items() if paths]
    if sum(map(len, without.values())) == len(photos):
        raise InputError(f"{folder}: expected masks with the names of the images, got {', '.join(said)}")
    if not count:
        raise InputError(f"{folder}: expected objects in the masks, got none in any of them: give other masks")
    for reason in said:
        warnings.warn(f"{folder}: {reason}: all of each counts as the object", stacklevel=2)
    return inside


def mark_patches(mask: Tensor, grid: PatchGrid) -> Tensor:
    """Mark the patches of a mask, 0 to 255, (H, W), of which more than half is bright: boolean (N,).

    >>> mark_patches(torch.tensor([[0, 255, 255, 255], [0, 0, 0, 255]]), PatchGrid((2, 4), 2)).tolist()
    [False, True]
    """
    bright = (mask > 127).float()
    return (F.avg_pool2d(bright[None, None], grid.patch_size) > 0.5).flatten()
