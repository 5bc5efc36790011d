"""Images with masks of their objects, image files of the same names: black and white, or with ids of classes."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.datasets import ImageFiles
from datamodules.truth import Crop, check_scale
from explainers.errors import InputError
from explainers.images.decoding import decode
from explainers.images.listing import existing_folder, list_images, several
from explainers.saved.files import file_hashes

LAYOUT = "<root>/images/<name>.jpg and <root>/masks/<name>.png"


def masked_images(
    root: str | Path,
    image_size: int,
    images: str = "images",
    masks: str = "masks",
    crop_fraction: float | None = 0.875,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> ImageFiles:
    """Images with masks of their objects, without labels: every sample has a `truth` mask, and the label -1.

    Images without a mask, and masks without an image, are left out with a warning.
    For other arguments see `ImageFiles`.

    Args:
        root: folder that holds both folders.
        images: folder of the images below `root`.
        masks: folder of the masks below `root`; the mask of an image has its path without the ending. A mask is black
            and white (grey from its middle on counts as white), or holds 0 and 1. It has the rows and columns of the
            stored image, at any scale.

    Raises:
        InputError: if a folder is missing, or no image has a mask.
    """
    pairs = pairs_of_files(Path(root), images, masks)
    paths, files = zip(*pairs, strict=True)
    return ImageFiles(paths, [-1] * len(paths), image_size, (), Masks(files), crop_fraction, limit, skip_corrupt)


def pairs_of_files(root: Path, images: str, masks: str) -> list[tuple[Path, Path]]:
    """Each image below a folder with its mask, sorted by name; warn of images and masks that have no other half.

    Args:
        root: folder that holds both folders.
        images: folder of the images below `root`.
        masks: folder of the masks below `root`.
    """
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
        ids: class of the object of every image, whose pixels in the mask hold it; `None` for black and white masks.
    """

    def __init__(self, paths: Sequence[Path], ids: Sequence[int] | None = None) -> None:
        self.paths = paths
        self.ids = ids

    def mask(self, position: int, crop: Crop) -> Tensor:
        """See `Truth`.

        Raises:
            CorruptImage: if the file cannot be decoded.
            InputError: if the mask has another aspect ratio than the image, or is not black and white.
        """
        path = self.paths[position]
        mask = read_mask(path) if self.ids is None else read_ids(path) == self.ids[position]
        check_scale(f"a mask ({path.name})", (mask.shape[0], mask.shape[1]), crop.stored)
        return crop.of_mask(mask)

    def contents(self, positions: Sequence[int]) -> Any:
        """See `Truth`."""
        hashes = file_hashes([self.paths[i] for i in positions])
        return hashes if self.ids is None else [hashes, [self.ids[i] for i in positions]]


def read_mask(path: Path) -> Tensor:
    """Read a black and white image, or one of 0 and 1, as booleans (rows, columns); grey from its middle on is True.

    Raises:
        InputError: if its brightest pixel is a dark grey, because these may be class ids.
    """
    image = decode(path)
    deep = image.mode.startswith("I")
    values = np.asarray(image if deep or image.mode in ("1", "L") else image.convert("L"))
    middle = 65535 / 2 if deep else 255 / 2
    brightest = values.max()
    if brightest <= 1:
        return torch.from_numpy(values > 0)
    if brightest < middle:
        raise InputError(
            f"{path}: expected a mask of black and white, or of 0 and 1, got values up to {brightest}; if they are ids"
            " of classes, take data=class_masks"
        )
    return torch.from_numpy(values > middle)


def read_ids(path: Path) -> Tensor:
    """Read ids of classes, int32 (rows, columns): palette index, grey value, or R + 256 · G + 65536 · B.

    Raises:
        CorruptImage: if the file cannot be decoded.
    """
    image = decode(path)
    whole = image.mode in ("1", "L", "P") or image.mode.startswith("I")
    values = np.asarray(image if whole else image.convert("RGB")).astype(np.int32)
    return torch.from_numpy(values if whole else values @ np.array([1, 256, 65536], dtype=np.int32))
