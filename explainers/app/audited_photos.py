"""The photos of an audit: their classes by folder, the masks of their objects, and their pixels."""

import csv
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.app.photos import Photo, decode_seen, list_photos
from explainers.app.session import Session
from explainers.auditing.store import Source, Stamp, stamp
from explainers.errors import InputError
from explainers.images.bands import PixelFormat, see_pixels
from explainers.images.decoding import CorruptImage
from explainers.images.listing import name_some, several
from explainers.images.masks import MaskValue, find_ranges, read_mask
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.names import class_index, class_names, find_image_classes, match_classes
from explainers.runtime.progress import progress

Labels = str | Path | Sequence[int | str] | Mapping[str, int | str] | None
"""Classes of images: "folder", those that they are in; one for each in the order of their names; name → class; a file
of names and classes, .csv or .json."""


Masks = str | Path | tuple[str | Path, MaskValue]
"""A folder of masks with the names of the images, see `read_mask`; or (folder, values of the object), such as ("masks",
"128-255"), where masks have several values beside 0."""


class Pictures(Mapping[int, Tensor]):
    """Number of a photo → what the model sees of it, as pictures show it, uint8 (3, H, W), decoded when it is asked.

    A file that has changed since its evidence was taken is no key.

    Args:
        session: decodes photos.
        photos: all photos of the audit.
        stamps: of their files when the evidence was taken, see `EvidenceStore.stamps`.
    """

    def __init__(self, session: Session, photos: Sequence[Photo], stamps: Sequence[Stamp]) -> None:
        self.session = session
        self.photos = photos
        self.stamps = stamps
        self.lost: set[int] = set()

    def read(self, numbers: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Decode what the model sees of some photos, (B, C, H, W), and the numbers of those that have not changed."""
        same = [number for number in numbers if stamp(self.photos[number].file) == self.stamps[number]]
        seen = decode_known(self.session, self.photos, same)
        self.lost |= {*numbers} - {*seen}
        return torch.stack([*seen.values()]) if seen else torch.empty(0), [*seen]

    def name_lost(self) -> None:
        """Warn of the photos that could not be read."""
        if self.lost:
            lost = several([Path(self.photos[number].name) for number in sorted(self.lost)])
            warnings.warn(f"neither hidden nor shown: {lost} changed since the evidence was taken", stacklevel=3)

    def __getitem__(self, number: int) -> Tensor:
        pixels, kept = self.read([number])
        if not kept:
            raise KeyError(number)
        return self.session.pixels.draw_seen(pixels[0])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.photos)))

    def __len__(self) -> int:
        return len(self.photos)


def decode_known(session: Session, photos: Sequence[Photo], numbers: Sequence[int]) -> dict[int, Tensor]:
    """Number → what the model sees, (C, H, W), of those photos whose files are there and can be decoded."""
    there = [number for number in numbers if stamp(photos[number].file)]
    seen = {number: decode_seen(photos[number], session.transform, session.pixels) for number in there}
    return {number: found[0] for number, found in seen.items() if found}


def list_folder(folder: str | Path) -> list[Photo]:
    """List the photos below a folder; an InputError for a file, or without any."""
    if Path(folder).expanduser().is_file():
        raise InputError(f"{folder}: expected a folder of images, got a file: give its folder")
    return list_photos(Path(folder))


def recall_photos(
    folder: str | Path, photos: Sequence[Photo], labels: Tensor, stored: Mapping[str, int]
) -> tuple[list[Photo], Tensor]:
    """Number photos as an audit has that was started before: those that are gone since keep their numbers and labels.

    Args:
        folder: of the photos.
        photos: those that are there.
        labels: their classes, (images,).
        stored: see `EvidenceStore.listing`. If it lacks a photo, it is of another audit, and counts for nothing.

    Returns:
        All photos, and their classes.
    """
    own = {photo.name: row for row, photo in enumerate(photos)}
    if len(own) < len(photos) or not own.keys() <= stored.keys():
        return [*photos], labels
    files = {name: Path(folder).expanduser() / name for name in stored}
    gone = [Photo(name, partial(PixelFormat.read_file, path=file), True, file) for name, file in files.items()]
    recalled = [photos[own[photo.name]] if photo.name in own else photo for photo in gone]
    return recalled, torch.tensor([labels[own[name]] if name in own else stored[name] for name in stored])


def make_source(session: Session, photos: Sequence[Photo], labels: Tensor) -> Source:
    """The photos as evidence is collected of them."""

    def batches(numbers: range) -> Iterator[tuple[Tensor, Sequence[int]]]:
        for start in range(numbers.start, numbers.stop, session.batch_size):
            part = range(start, min(start + session.batch_size, numbers.stop))
            seen = decode_known(session, photos, part)
            if seen:
                yield torch.stack([*seen.values()]), [*seen]

    files = [photo.file for photo in photos if photo.file]
    return Source([photo.name for photo in photos], labels.tolist(), files, batches)


def find_labels(labels: Labels, photos: Sequence[Photo], target: TargetModel) -> Tensor:
    """Find the class of each photo of a folder; −1 where it is not known, (images,).

    Args:
        labels: `folder`: the first folder in the name of a photo is its class, see `match_folders`. Or a class for each
            photo, by name or index, in a list in the order of their names, or by their names, see `match_names`; also
            in a file, see `read_labels`. `None`: not known.
        photos: those of one folder.

    Raises:
        InputError: for folders, names or numbers that are no class of the model, a list of another length, and names
            that fit no photo, or several.
    """
    if labels is None:
        return torch.full((len(photos),), -1)
    if labels == "folder":
        return _find_folder_labels(photos, target)
    names = class_names(target)
    if isinstance(labels, Mapping):
        pairs = [*labels.items()]
    elif isinstance(labels, str | Path):
        pairs = read_labels(labels)
    else:
        return torch.tensor(find_image_classes(labels, names, len(photos), "labels"))
    matched = match_names([name for name, _ in pairs], photos)
    if isinstance(labels, str | Path) and pairs and pairs[0][0] not in matched:  # titles of columns
        pairs = pairs[1:]
    found: dict[int, int] = {}
    for number, label in [(matched[name], label) for name, label in pairs if name in matched]:
        of = class_index(label, names, "labels")
        if found.setdefault(number, of) != of:
            two = f"{names[found[number]]} and {names[of]}"
            raise InputError(f"labels: {photos[number].name} has two classes, {two}", "labels")
    bare = [photo.name for number, photo in enumerate(photos) if number not in found]
    others = [str(name) for name, _ in pairs if name not in matched]
    said = [f"{len(bare)} of {len(photos)} images have no label ({name_some(bare)})"] * bool(bare)
    said += [f"{len(others)} of {len(pairs)} names are no image ({name_some(others)})"] * bool(others)
    if not found:
        advice = f"give the names of the images, such as {photos[0].name}"
        raise InputError(f"labels: {'; '.join(said)}: {advice}", "labels")
    if said:
        warnings.warn(f"labels: {'; '.join(said)}", stacklevel=2)
    return torch.tensor([found.get(number, -1) for number in range(len(photos))])


def read_labels(file: str | Path) -> list[tuple[str, int | str]]:
    """Read names and classes of images: JSON with name → class, or CSV of two columns."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
        if Path(file).suffix == ".json":
            return [*json.loads(text).items()]
        rows = csv.reader(text.splitlines(), delimiter=max(",;\t", key=text.partition("\n")[0].count))
        return [(name, label) for name, label in filter(None, rows)]
    except (OSError, ValueError, AttributeError, RecursionError, csv.Error) as error:
        wanted = "folder, or a file .json, or .csv of two columns: the name and the class of each image"
        raise InputError(f"labels={file}: expected {wanted}", "labels") from error


def match_names(given: Sequence[str | Path], photos: Sequence[Photo]) -> dict[str | Path, int]:
    """Find the photo that each name means: by its name in the folder, or by an end of its path; the ending may lack.

    Returns:
        Name → number of the photo; names of no photo are left out.

    Raises:
        InputError: for a name that several photos have.
    """
    exact = {photo.name: number for number, photo in enumerate(photos)}
    ends: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for number, photo in enumerate(photos):
        path = Path(os.path.abspath(photo.file or photo.name))
        for each in {path, path.with_suffix("")}:
            ends[each.name.lower()].append((each.as_posix().lower(), number))
    matched: dict[str | Path, int] = {}
    for name in given:
        end = "/".join(part for part in PurePath(str(name).strip().lower()).parts if part not in ("/", ".."))
        numbers = [number for whole, number in ends.get(end.rpartition("/")[2], ()) if whole.endswith(f"/{end}")]
        if len(numbers) > 1 and str(name) not in exact:
            shared = name_some([photos[number].name for number in numbers])
            said = f"{name} is the name of {len(numbers)} images ({shared})"
            raise InputError(f"labels: {said}: add their folders", "labels")
        if numbers:
            matched[name] = exact.get(str(name), numbers[0])
    return matched


def _find_folder_labels(photos: Sequence[Photo], target: TargetModel) -> Tensor:
    folders = [photo.name.rpartition("/")[0].partition("/")[0] for photo in photos]
    names = sorted(set(folders) - {""})
    if not names:
        raise InputError(
            f"labels=folder: expected a folder for each class, got {len(photos)} images in one folder: sort them by"
            " class, or leave out the labels",
            "labels",
        )
    indices = dict(zip(names, match_folders(names, target), strict=True)) | {"": -1}
    if "" in folders:
        count = folders.count("")
        beside = f"{count} image{'s' * (count > 1)} beside the folders"
        warnings.warn(f"labels=folder: no labels of {beside} of classes", stacklevel=2)
    if len(names) == 1:
        said = f"all images are of one class, {names[0]}: what only this class has cannot be told from what all have"
        warnings.warn(f"labels=folder: {said}; add folders of other classes", stacklevel=2)
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
        raise InputError(f"labels=folder: {error}", "labels", *error.settings) from error


def find_objects(masks: Masks, photos: Sequence[Photo], session: Session, grid: PatchGrid) -> Tensor:
    """Find the patches on the objects of photos: boolean (images, N).

    A mask has the name of its photo, with any ending. A patch is on the object if most of its pixels are. All patches
    of a photo without a mask that can be decoded count as on it, which a warning says.

    Args:
        masks: see `Masks`.
        photos: those of one folder.
        session: sees photos, and so their masks.

    Raises:
        InputError: if no photo has a mask, if no mask has an object, or if it is open which values are the object.
    """
    folder, value = masks if isinstance(masks, tuple) else (masks, None)
    ranges, listed = find_ranges(value), list_folder(folder)
    files = {PurePath(each.name).with_suffix(""): each.file or Path(each.name) for each in listed}
    if len(files) < len(listed):
        raise InputError(f"{folder}: expected a mask of each name, got {len(listed)} files of {len(files)} names")
    inside = torch.ones(len(photos), grid.num_patches, dtype=torch.bool)
    without, with_object, transform = [], 0, replace(session.transform, fill=(0,))
    with progress("reading masks", len(photos), "mask", delay=2) as bar:
        for row, photo in zip(inside, photos, strict=True):
            bar.update(1)
            try:
                pixels = read_mask(files[PurePath(photo.name).with_suffix("")], ranges)
            except (KeyError, CorruptImage):
                without.append(Path(photo.name))
                continue
            with_object += bool(pixels.any())
            row.copy_(mark_patches(see_pixels(pixels[..., None] * np.uint8(255), transform)[0][0], grid))
    lacking = f"no mask that can be decoded of {several(without)}"
    if len(without) == len(photos):
        raise InputError(f"{folder}: expected masks with the names of the images, got {lacking}")
    if not with_object:
        raise InputError(f"{folder}: expected objects in the masks, got none in any of them: give other masks")
    if without:
        warnings.warn(f"{folder}: {lacking}: all of each counts as the object", stacklevel=2)
    return inside


def mark_patches(mask: Tensor, grid: PatchGrid) -> Tensor:
    """Mark the patches of a mask, 0 to 255, (H, W), more than half of which are bright: boolean (N,).

    >>> mark_patches(torch.tensor([[0, 255, 255, 255], [0, 0, 0, 255]]), PatchGrid((2, 4), 2)).tolist()
    [False, True]
    """
    bright = (mask > 127).float()
    return (F.avg_pool2d(bright[None, None], grid.patch_size) > 0.5).flatten()
