"""COCO's instance masks, from its annotation files: the category with the largest area is explained."""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from datamodules.datasets import ImageFiles, Reading, check_below, read_json
from datamodules.truth import Crop, Size, check_scale
from explainers.errors import InputError
from explainers.images.listing import existing_folder, several
from explainers.images.transform import ImageTransform

FORMAT = 'COCO\'s {"images": [...], "annotations": [...], "categories": [...]} with segmentations'
FINER = 5  # lines of the grid on which COCO draws polygons, for each pixel
FARTHEST = 1e5  # largest coordinate of a polygon, in pixels: its points on the finer grid take memory


def coco_masks(
    root: str | Path,
    transform: ImageTransform,
    images: str = "val2017",
    annotations: str = "annotations/instances_val2017.json",
    category: str | None = None,
    labelled: bool = False,
    **reading: Unpack[Reading],
) -> ImageFiles:
    """Images with the instances of one category: every sample has a `truth` mask, all pixels of these instances.

    Images without such instances are left out with a warning. For other arguments see `ImageFiles`.

    Args:
        root: folder to which both are relative.
        images: folder of the images.
        annotations: JSON file of instances, with polygons or run lengths, compressed or not.
        category: name of the category; `None` takes, in each image, the category whose instances have the largest area.
        labelled: whether labels number the categories in the order of their ids; False gives the label -1, because the
            head of the target knows other classes.

    Raises:
        InputError: if the folder or the file is missing, or the file has another format, no such category, a
            segmentation that cannot be drawn, or the name of an image outside the folder.
    """
    folder = existing_folder(Path(root) / images, "of COCO's images")
    source = Path(root) / annotations
    content = read_json(source)
    try:
        names = {row["id"]: row["name"] for row in sorted(content["categories"], key=lambda row: row["id"])}
        wanted = next((number for number, name in names.items() if name == category), None)
        instances = list_instances(content["annotations"], wanted)
        rows = sorted(content["images"], key=lambda row: row["id"])
        paths = [folder / row["file_name"] for row in rows]
        chosen = [i for i, row in enumerate(rows) if row["id"] in instances]
        categories = [instances[rows[i]["id"]][0] for i in chosen]
        sizes = [(int(rows[i]["height"]), int(rows[i]["width"])) for i in chosen]
        shown = [instances[rows[i]["id"]][1] for i in chosen]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source}: expected {FORMAT}, got none ({error!r}): take an instances_*.json") from error
    if category is not None and wanted is None:
        known = ", ".join(list(names.values())[:3])
        raise InputError(f"expected category as one of COCO, such as {known}, got {category}")
    check_below(folder, paths, source)
    for size, ones in zip(sizes, shown, strict=True):
        for one in ones:
            if fault := find_fault(one.get("segmentation"), size):
                raise InputError(f"{source}: annotation {one.get('id')}: {fault}; correct or remove it")
    truth = Instances([[one["segmentation"] for one in ones] for ones in shown], sizes)
    without = [path for path, row in zip(paths, rows, strict=True) if row["id"] not in instances]
    if without:
        warnings.warn(f"left out: {several(without)} without instances of {category or 'any category'}", stacklevel=2)
    if not chosen:
        raise InputError(f"expected images with instances of {category or 'any category'}, got none in {annotations}")
    order = {number: label for label, number in enumerate(names)}
    labels = [order[number] if labelled else -1 for number in categories]
    classes = list(names.values()) if labelled else ()
    files = [paths[i] for i in chosen]
    return ImageFiles(files, labels, transform, classes, truth, **reading)


def list_instances(annotations: Sequence[Any], category: int | None) -> dict[int, tuple[int, list[Any]]]:
    """Id of an image → the id of the category, by default that with the largest area, and its instances of it."""
    of_images: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for one in annotations:
        of_images[one["image_id"]][one["category_id"]].append(one)
    if category is not None:
        return {image: (category, kinds[category]) for image, kinds in of_images.items() if category in kinds}

    def area(entry: tuple[int, list[Any]]) -> float:
        return sum(one["area"] for one in entry[1])

    return {image: max(sorted(kinds.items()), key=area) for image, kinds in of_images.items()}


class Instances:
    """Segmentations of the objects of every image, in COCO's format, see `Truth`, and the sizes of the images."""

    def __init__(self, segmentations: Sequence[Sequence[Any]], sizes: Sequence[Size]) -> None:
        self.segmentations = segmentations
        self.sizes = sizes

    def is_upright(self, position: int, image: Path) -> bool:
        """See `Truth`."""
        return False

    def mask(self, position: int, crop: Crop) -> Tensor:
        """See `Truth`; an InputError if the image has another aspect ratio than its annotation."""
        size = self.sizes[position]
        check_scale("instances", size, crop.stored)
        masks = [draw(segmentation, size) for segmentation in self.segmentations[position]]
        return crop.of_mask(torch.from_numpy(np.logical_or.reduce(masks)))

    def contents(self, positions: Sequence[int]) -> Any:
        """See `Truth`."""
        return [[self.segmentations[i], self.sizes[i]] for i in positions]


def find_fault(segmentation: Any, size: Size) -> str | None:
    """What is wrong with a segmentation, see `draw`; `None` if it can be drawn."""
    try:
        if not isinstance(segmentation, list):
            counts = segmentation["counts"]
            lengths = run_lengths(counts) if isinstance(counts, str) else counts
            whole = all(isinstance(length, int) and length >= 0 for length in lengths)
            if whole and tuple(segmentation["size"]) == size and sum(lengths) == size[0] * size[1]:
                return None
            got = f"{sum(lengths)} of {segmentation['size']}"
            return f"expected run lengths of {size[0]} × {size[1]} pixels, got {got}"
        for polygon in segmentation:
            if len(polygon) % 2 or len(polygon) < 6:
                return f"expected x and y of at least 3 points in each polygon, got {len(polygon)} numbers"
            if not all(abs(side) <= FARTHEST for side in polygon):
                return f"expected pixels of an image of {size[0]} × {size[1]}, got {str(polygon)[:80]}"
    except (TypeError, KeyError, IndexError) as error:
        return f"expected polygons or run lengths, got {str(segmentation)[:80]} ({error!r})"
    return None if segmentation else "expected polygons or run lengths, got []"


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
        return np.logical_or.reduce([fill(np.reshape(polygon, (-1, 2)), size) for polygon in segmentation])
    counts = segmentation["counts"]
    lengths = run_lengths(counts) if isinstance(counts, str) else counts
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape(size[1], size[0]).T


def fill(corners: np.ndarray, size: Size) -> np.ndarray:
    """Fill a polygon as COCO's own tools do: booleans (rows, columns).

    Its boundary is drawn on a grid of `FINER` lines for each pixel. Where it crosses the middle of a column of pixels,
    the column changes between outside and inside from the next pixel on.

    Args:
        corners: x and y in pixels, (n, 2).
        size: height and width of the image, in pixels.

    >>> fill(np.array([[1, 0], [3, 0], [3, 2], [1, 2]]), (2, 4)).astype(int).tolist()
    [[0, 1, 1, 0], [0, 1, 1, 0]]
    """
    rows, columns = size
    ends = (FINER * corners + 0.5).astype(int)
    x, y = np.concatenate([boundary(*edge) for edge in zip(ends, np.roll(ends, -1, 0), strict=True)]).T
    steps = np.flatnonzero(np.diff(x))
    column = (np.minimum(x[steps], x[steps + 1]) - FINER // 2) / FINER
    row = np.ceil((np.minimum(y[steps], y[steps + 1]) - FINER // 2) / FINER).clip(0, rows)
    inside = (column == np.floor(column)) & (column >= 0) & (column < columns)
    places = (column * rows + row)[inside].astype(int)  # column by column, as run lengths
    changes = np.bincount(places, minlength=rows * columns)[: rows * columns]
    return (changes.cumsum() % 2 == 1).reshape(columns, rows).T


def boundary(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The points of the finer grid on an edge, one for each step of its longer side: (n, 2), from `start` to `end`.

    Halves are rounded up as seen from the end with the lower coordinate, so that both directions have the same points.
    """
    along = int(abs(end[1] - start[1]) > abs(end[0] - start[0]))
    low, high = (start, end) if start[along] <= end[along] else (end, start)
    length = high[along] - low[along]
    steps = np.arange(length + 1)
    slope = (high[1 - along] - low[1 - along]) / max(length, 1)
    points = np.empty((length + 1, 2), dtype=int)
    points[:, along] = low[along] + steps
    points[:, 1 - along] = (low[1 - along] + slope * steps + 0.5).astype(int)
    return points if low is start else points[::-1]


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
