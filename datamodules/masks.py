"""Images with masks of their objects, image files of the same names: of one object, or with ids of classes."""

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from datamodules.datasets import ImageFiles, Reading, choose_transform, spread
from datamodules.ilsvrc import imagenet_classes, imagenet_labels
from datamodules.truth import Crop, check_scale, is_scaled
from explainers.errors import InputError, check_range
from explainers.images.decoding import CorruptImage, read_orientation, read_stored_size
from explainers.images.listing import existing_folder, list_images, several
from explainers.images.masks import MaskValue, Ranges, find_ranges, read_ids, read_mask
from explainers.images.transform import ImageTransform
from explainers.runtime.progress import progress
from explainers.saved.files import file_hashes

SWAPPED = range(5, 9)
"""EXIF orientations that swap rows and columns."""

LAYOUT = "<root>/images/<name>.jpg and <root>/masks/<name>.png"


def masked_images(
    root: str | Path,
    transform: ImageTransform,
    images: str = "images",
    masks: str = "masks",
    mask_value: MaskValue = None,
    **reading: Unpack[Reading],
) -> ImageFiles:
    """Images with masks of their objects, without labels: every sample has a `truth` mask, and the label -1.

    Images without a mask, and masks without an image, are left out with a warning.
    For other arguments see `ImageFiles`.

    Args:
        root: folder that holds both folders.
        images: folder of the images below `root`.
        masks: folder of the masks below `root`; the mask of an image has its path without the ending. What is the
            object, says `read_mask`. A mask has the size of the image, at any scale: of the image turned by its EXIF
            orientation, or of the stored one if only that fits.
        mask_value: values of the object where masks have several beside 0, see `MaskValue`.

    Raises:
        InputError: if a folder is missing, or no image has a mask.
    """
    ranges = find_ranges(mask_value)
    pairs = pair_files(Path(root), images, masks)
    paths, files = zip(*pairs, strict=True)
    truth = Masks(files, None, ranges)
    return ImageFiles(paths, [-1] * len(paths), transform, truth=truth, **reading)


def class_masks(
    root: str | Path,
    transform: ImageTransform,
    images: str = "images",
    masks: str = "masks",
    classes: Sequence[str] | None = None,
    ignored: Sequence[int] = (),
    least_area: float = 0.05,
    imagenet: bool = False,
    **reading: Unpack[Reading],
) -> ImageFiles:
    """Images with masks whose pixels hold ids of classes. The label of an image is the class with the largest area.

    Areas are those in the sample; `truth` holds the pixels of the label. Images in which no class is large enough are
    left out with a warning. For other arguments see `masked_images`.

    Args:
        masks: folder of the masks, see `read_ids`. Id 0 is no class, id 1 the first of `classes`.
        classes: names of the classes; `None` takes the sorted names of the folders below `images`.
        ignored: further ids that are no class, such as 255, or 1000 in ImageNet-S.
        least_area: smallest area of an object, as a fraction of the sample.
        imagenet: whether `classes` are identifiers such as n01440764, and labels those of ImageNet-1k, 0 to 999.
        limit: see `ImageFiles`; images without a large class count.

    Raises:
        InputError: if a folder is missing, no image has a mask, a mask holds an unknown id, or a class is unknown.
    """
    shown = choose_transform(transform, reading.get("crop_fraction"))
    skip_corrupt = reading.get("skip_corrupt", False)
    check_range(0, 1, least_area=least_area)
    folder = Path(root) / images
    pairs = pair_files(Path(root), images, masks)
    folders = (path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = list(classes) if classes else sorted(folders)
    find = partial(largest_class, shown, len(names), ignored, least_area, skip_corrupt)
    chosen = [pairs[i] for i in spread(len(pairs), reading.get("limit"))]
    ids = []
    with ThreadPoolExecutor() as threads, progress("reading masks", len(chosen), "mask", delay=2) as bar:
        for number in threads.map(find, chosen):
            ids.append(number)
            bar.update(1)
    without = [image for (image, _), number in zip(chosen, ids, strict=True) if number == 0]
    area = f"a class on {100 * least_area:g} % of the sample"
    if without:
        warnings.warn(f"left out: {several(without)} without {area}", stacklevel=2)
    large_enough = [(*pair, number) for pair, number in zip(chosen, ids, strict=True) if number]
    if not large_enough:
        raise InputError(f"expected {area} in images of {folder}, got none in {len(chosen)}: lower least_area")
    paths, files, numbers = zip(*large_enough, strict=True)
    labels = imagenet_labels(names, folder) if imagenet else range(len(names))
    of_samples = [labels[number - 1] for number in numbers]
    truth = Masks(files, numbers)
    of_labels = imagenet_classes() if imagenet else names
    return ImageFiles(paths, of_samples, shown, of_labels, truth, skip_corrupt=skip_corrupt)


def largest_class(
    transform: ImageTransform,
    classes: int,
    ignored: Sequence[int],
    least_area: float,
    skip_corrupt: bool,
    pair: tuple[Path, Path],
) -> int | None:
    """The id of the largest class in a sample; 0 if none is large enough, `None` for a corrupt image or mask.

    Args:
        transform: see `Crop`.
        classes: number of classes; their ids are 1, 2, ...
        ignored: ids that are no class.
        least_area: smallest area, as a fraction of the sample.
        skip_corrupt: for a file that cannot be decoded, warn instead of raising an error.
        pair: files of the image and of its mask.
    """
    try:
        stored = read_stored_size(pair[0])
        turned = is_drawn_upright(*pair) and read_orientation(pair[0]) in SWAPPED
        crop = Crop(stored[::-1] if turned else stored, transform)
        ids = torch.from_numpy(read_ids(pair[1]))
    except CorruptImage as error:
        if not skip_corrupt:
            raise CorruptImage(f"{error}; repair or delete the file, or set skip_corrupt=true") from error
        warnings.warn(f"left out: {error}", stacklevel=2)
        return None
    areas = crop.of_mask(ids).flatten().bincount(minlength=2)
    areas[[0, *(number for number in ignored if number < len(areas))]] = 0
    if len(areas) > classes + 1 and areas[classes + 1 :].any():
        raise InputError(
            f"{pair[1]}: expected ids from 0 to {classes}, one for each class, got {int(areas.nonzero()[-1])}: name all"
            " classes (classes), or ignore the id (ignored)"
        )
    largest = int(areas.argmax())
    return largest if areas[largest] >= max(1, least_area * math.prod(transform.size)) else 0


def is_drawn_upright(image: Path, mask: Path) -> bool:
    """Whether a mask is drawn on the image turned by its EXIF orientation, as programs show it.

    False if only the stored rows and columns fit the mask's size. If both fit, a warning says what is taken.
    """
    orientation = read_orientation(image)
    if orientation == 1:
        return True
    stored, drawn_on = read_stored_size(image), read_stored_size(mask)
    if orientation in SWAPPED and not is_scaled(stored, stored[::-1]):
        return is_scaled(drawn_on, stored[::-1]) or not is_scaled(drawn_on, stored)
    warnings.warn(
        f"{image.name} is turned by its EXIF orientation ({orientation}), and its mask counts as drawn on the turned"
        " image: if it belongs to the stored rows, save the image without its orientation",
        stacklevel=2,
    )
    return True


def pair_files(root: Path, images: str, masks: str) -> list[tuple[Path, Path]]:
    """Each image with its mask, sorted by name, see `masked_images`; warn of those that have no other half."""
    existing_folder(root, f"with {images}/ and {masks}/")
    folders = [existing_folder(root / name, f"of {kind}") for name, kind in ((images, "images"), (masks, "masks"))]
    listed = list_images(folders)
    of_image, of_mask = (
        {str(path.relative_to(folder).with_suffix("")): path for path in paths}
        for folder, paths in zip(folders, listed, strict=True)
    )
    for folder, paths, named in zip(folders, listed, (of_image, of_mask), strict=True):
        if len(named) < len(paths):
            twice = [path for path in paths if path not in named.values()]
            raise InputError(f"expected one file of each name in {folder}, got two of {several(twice)}; remove one")
    both = sorted(of_image.keys() & of_mask.keys())
    if not both:
        raise InputError(
            f"expected {LAYOUT}, got no name that is in both {folders[0]} ({len(of_image)} images) and {folders[1]}"
            f" ({len(of_mask)}): rename the files, or set images and masks to other folders"
        )
    for missing, named, other in (("a mask", of_image, of_mask), ("an image", of_mask, of_image)):
        alone = [named[name] for name in sorted(named.keys() - other.keys())]
        if alone:
            warnings.warn(f"left out: {several(alone)} without {missing}", stacklevel=3)
    return [(of_image[name], of_mask[name]) for name in both]


class Masks:
    """Files of masks, see `Truth`.

    Args:
        paths: the mask of every image.
        ids: class of the object of every image, whose pixels in the mask hold it; `None` for masks of one object.
        ranges: values of this object, see `read_mask`.
    """

    def __init__(self, paths: Sequence[Path], ids: Sequence[int] | None = None, ranges: Ranges = ()) -> None:
        self.paths = paths
        self.ids = ids
        self.ranges = ranges

    def is_upright(self, position: int, image: Path) -> bool:
        """See `Truth`."""
        return is_drawn_upright(image, self.paths[position])

    def mask(self, position: int, crop: Crop) -> Tensor:
        """See `Truth`.

        Raises:
            CorruptImage: if the file cannot be decoded.
            InputError: if the mask has another aspect ratio than the image, or it is open which values are the object.
        """
        path = self.paths[position]
        mask = read_mask(path, self.ranges) if self.ids is None else read_ids(path) == self.ids[position]
        check_scale(f"a mask ({path.name})", (mask.shape[0], mask.shape[1]), crop.stored)
        return crop.of_mask(torch.from_numpy(mask))

    def contents(self, positions: Sequence[int]) -> Any:
        """See `Truth`."""
        hashes = file_hashes([self.paths[i] for i in positions])
        if self.ids is not None:
            return [hashes, [self.ids[i] for i in positions]]
        return [hashes, self.ranges] if self.ranges else hashes
