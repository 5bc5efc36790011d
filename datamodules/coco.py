"""COCO's instance masks, from its annotation files: the category with the largest area is explained."""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from datamodules.boxes import read_json
from datamodules.datasets import ImageFiles
from datamodules.truth import Crop, Size, check_scale
from explainers.errors import InputError
from explainers.images.listing import existing_folder, several

FORMAT = 'COCO\'s {"images": [...], "annotations": [...], "categories": [...]} with segmentations'


def coco_masks(
    root: str | Path,
    image_size: int,
    images: str = "val2017",
    annotations: str = "annotations/instances_val2017.json",
    category: str | None = None,
    labelled: bool = False,
    crop_fraction: float | None = 0.875,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> ImageFiles:
    """Images with the instances of one category: every sample has a `truth` mask, all pixels of these instances.

    Images without such instances are left out with a warning.

    Args:
        root: folder to which both are relative.
        image_size: see `ImageFiles`.
        images: folder of the images.
        annotations: JSON file of instances, with polygons or run lengths, compressed or not.
        category: name of the category; `None` takes, in each image, the category whose instances have the largest area.
        labelled: whether labels number the categories in the order of their ids; False gives the label -1, because the
            head of the target knows other classes.
        crop_fraction: see `ImageFiles`.
        limit: see `ImageFiles`.
        skip_corrupt: see `ImageFiles`.

    Raises:
        InputError: if the folder or the file is missing, or the file has another format, or no such category.
    """
    folder = existing_folder(Path(root) / images, "of COCO's images")
    content = read_json(Path(root) / annotations)
    try:
        names = {row["id"]: row["name"] for row in sorted(content["categories"], key=lambda row: row["id"])}
        instances = instances_of(content["annotations"], named(category, names))
        rows = sorted(content["images"], key=lambda row: row["id"])
        paths = [folder / row["file_name"] for row in rows]
        chosen = [i for i, row in enumerate(rows) if row["id"] in instances]
        categories = [instances[rows[i]["id"]][0] for i in chosen]
        truth = Instances(
            [[one["segmentation"] for one in instances[rows[i]["id"]][1]] for i in chosen],
            [(int(rows[i]["height"]), int(rows[i]["width"])) for i in chosen],
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{Path(root) / annotations}: expected {FORMAT}, got none ({error!r})") from error
    without = [path for path, row in zip(paths, rows, strict=True) if row["id"] not in instances]
    if without:
        warnings.warn(f"left out: {several(without)} without instances of {category or 'any category'}", stacklevel=2)
    if not chosen:
        raise InputError(f"expected images with instances of {category or 'any category'}, got none in {annotations}")
    order = {number: label for label, number in enumerate(names)}
    labels = [order[number] if labelled else -1 for number in categories]
    classes = list(names.values()) if labelled else ()
    files = [paths[i] for i in chosen]
    return ImageFiles(files, labels, image_size, classes, truth, crop_fraction, limit, skip_corrupt)


def named(category: str | None, names: Mapping[int, str]) -> int | None:
    """The id of a category; `None` for `None`."""
    matching = [number for number, name in names.items() if name == category]
    if category is not None and not matching:
        raise InputError(f"expected a category of COCO, such as {', '.join(list(names.values())[:3])}, got {category}")
    return matching[0] if matching else None


def instances_of(annotations: Sequence[Any], category: int | None) -> dict[int, tuple[int, list[Any]]]:
    """Id of an image → the id of its category, and its instances of it.

    Args:
        annotations: instances of all images.
        category: id of the category; `None` takes the category with the largest area in each image.
    """
    of_images: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for one in annotations:
        of_images[one["image_id"]][one["category_id"]].append(one)
    if category is not None:
        return {image: (category, kinds[category]) for image, kinds in of_images.items() if category in kinds}
    areas = {
        image: {number: sum(one["area"] for one in instances) for number, instances in sorted(by_category.items())}
        for image, by_category in of_images.items()
    }
    largest = {image: max(own, key=lambda number: own[number]) for image, own in areas.items()}
    return {image: (number, of_images[image][number]) for image, number in largest.items()}


class Instances:
    """Segmentations of the objects of images, see `Truth`.

    Args:
        segmentations: in COCO's format, those of every image.
        sizes: height and width of every image.
    """

    def __init__(self, segmentations: Sequence[Sequence[Any]], sizes: Sequence[Size]) -> None:
        self.segmentations = segmentations
        self.sizes = sizes

    def mask(self, position: int, crop: Crop) -> Tensor:
        """See `Truth`.

        Raises:
            InputError: if the image has another aspect ratio than its annotation, or a segmentation has another size.
        """
        size = self.sizes[position]
        check_scale("instances", size, crop.stored)
        masks = [draw(segmentation, size) for segmentation in self.segmentations[position]]
        return crop.of_mask(torch.from_numpy(np.logical_or.reduce(masks)))

    def contents(self, positions: Sequence[int]) -> Any:
        """See `Truth`."""
        return [[self.segmentations[i], self.sizes[i]] for i in positions]


def draw(segmentation: Any, size: Size) -> np.ndarray:
    """Draw a segmentation as booleans (rows, columns).

    Args:
        segmentation: polygons [[x, y, x, y, ...], ...] in pixels; or {"size": [rows, columns], "counts": run lengths},
            as a list or as COCO's text.
        size: height and width of the image, in pixels.

    >>> draw({"size": [2, 3], "counts": [1, 3, 2]}, (2, 3)).astype(int).tolist()  # column by column, from outside
    [[0, 1, 0], [1, 1, 0]]
    """
    if isinstance(segmentation, list):
        mask = Image.new("1", (size[1], size[0]))
        for polygon in segmentation:
            # A pixel's centre, half a pixel from its corner in COCO, has whole coordinates in Pillow
            ImageDraw.Draw(mask).polygon([side - 0.5 for side in polygon], fill=1)
        return np.array(mask)
    counts = segmentation["counts"]
    lengths = run_lengths(counts) if isinstance(counts, str) else counts
    if tuple(segmentation["size"]) != size or sum(lengths) != size[0] * size[1]:
        raise InputError(
            f"expected run lengths of {size[0]} × {size[1]} pixels, got {sum(lengths)} of {segmentation['size']}: take"
            " the annotations of these images"
        )
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape(size[1], size[0]).T


def run_lengths(text: str) -> list[int]:
    """Decode COCO's text of run lengths.

    A number is its 5-bit digits, lowest first, each 48 below its character; bit 5 says that another digit follows, and
    bit 4 of the last one is the sign. From the fourth number on, it is the difference to the number two before.

    >>> run_lengths("132")
    [1, 3, 2]
    """
    numbers: list[int] = []
    value = place = 0
    for code in text.encode():
        digit = code - 48
        value |= (digit & 31) << place
        place += 5
        if digit & 32:
            continue
        if digit & 16:
            value -= 1 << place
        numbers.append(value + (numbers[-2] if len(numbers) > 2 else 0))
        value = place = 0
    return numbers
