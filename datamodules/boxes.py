"""Images with boxes around their objects, in a list that names them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.datasets import ImageFiles
from datamodules.truth import Boxes
from explainers.errors import InputError
from explainers.images.listing import existing_folder
from explainers.saved.files import printable


def annotated_images(
    root: str | Path,
    image_size: int,
    annotations: str = "annotations.json",
    classes: str | None = None,
    crop_fraction: float | None = 0.875,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> ImageFiles:
    """Images with annotated object boxes: every sample has a `truth` mask. For other arguments see `ImageFiles`.

    Args:
        root: folder to which all file names are relative; files outside it are refused.
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
    check_below(folder, paths, folder / annotations)
    names = read_json(folder / classes)["wnids"] if classes else ()
    return ImageFiles(paths, labels, image_size, names, Boxes(boxes), crop_fraction, limit, skip_corrupt)


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises an InputError that names the file if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"expected a JSON file {path}, got {error}; correct the path or the file") from error


def check_below(folder: Path, paths: Sequence[Path], source: Path) -> None:
    """Raise an InputError for a file outside the folder, by its name or through a link.

    A data set from elsewhere could otherwise show any image file of this machine.

    Args:
        folder: the folder of the data set.
        paths: files that the data set names.
        source: the file that names them.
    """
    real = os.path.realpath(folder)
    for path in paths:
        if "\0" in str(path) or not Path(os.path.realpath(path)).is_relative_to(real):
            raise InputError(
                f"{source}: expected files below {folder}, got {printable(str(path))}, which is or leads elsewhere:"
                " correct the name, or copy the file into the folder"
            )
