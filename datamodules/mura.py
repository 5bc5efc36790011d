"""MURA-v1.1: radiographs of the upper extremity in studies labelled normal or abnormal (Rajpurkar et al., 2018)."""

from pathlib import Path
from typing import Literal, Unpack

from datamodules.datasets import ImageFiles, Reading
from explainers.errors import InputError, checks_choices
from explainers.images.listing import existing_folder, list_images
from explainers.images.transform import ImageTransform

CLASSES = ("negative", "positive")
LAYOUT = "<root>/<split>/XR_WRIST/patient00001/study1_positive/image1.png"


@checks_choices
def mura(
    root: str | Path,
    split: Literal["train", "valid"],
    transform: ImageTransform,
    **reading: Unpack[Reading],
) -> ImageFiles:
    """Read the images below <root>/<split>, in the layout that Stanford publishes, with the labels of their studies.

    The files are grey images of several sizes. A sample has three equal channels.
    For other arguments see `ImageFiles`.

    Args:
        root: the unpacked folder MURA-v1.1.
        split: folder of the split.

    Raises:
        InputError: if the folder of the split is missing or holds no images, or that of an image ends neither in
            `_negative` nor in `_positive`.
    """
    (paths,) = list_images([existing_folder(Path(root) / split, f"of MURA-v1.1, {LAYOUT}")])
    if not paths:
        raise InputError(f"expected images like {LAYOUT}, got none below {Path(root) / split}; correct the root")
    labels = [study_label(path) for path in paths]
    return ImageFiles(paths, labels, transform, CLASSES, **reading)


def study_label(path: Path) -> int:
    """1 for an image of a positive (abnormal) study, 0 for an image of a negative (normal) study.

    >>> study_label(Path("XR_WRIST/patient00001/study1_positive/image1.png"))
    1
    """
    _, _, name = path.parent.name.rpartition("_")
    if name not in CLASSES:
        raise InputError(
            f"{path}: expected a folder of a study, whose name ends in _negative or _positive, got {path.parent.name};"
            " remove the image"
        )
    return CLASSES.index(name)
