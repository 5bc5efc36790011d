"""MURA-v1.1, radiographs of the upper extremity, each study labelled normal or abnormal (Rajpurkar et al., 2018)."""

from pathlib import Path
from typing import Literal

from datamodules.datasets import ImageFiles, existing_folder, list_images
from explainers.errors import InputError

CLASSES = ("negative", "positive")
LAYOUT = "<root>/<split>/XR_WRIST/patient00001/study1_positive/image1.png"


def mura(
    root: str | Path,
    split: Literal["train", "valid"],
    image_size: int,
    crop_fraction: float = 1.0,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> ImageFiles:
    """The images below <root>/<split> as Stanford publishes them; an image has the label of its study's folder.

    They are grey, and of several sizes: every sample has three equal channels and its square centre.

    Raises:
        InputError: for a folder that is not there, or holds no images.
        InputError: for an image in a folder that is neither `_negative` nor `_positive`.
    """
    paths = list_images(existing_folder(Path(root) / split, f"of MURA-v1.1, {LAYOUT}"))
    if not paths:
        raise InputError(f"expected images like {LAYOUT}, got none below {Path(root) / split}; correct the root")
    labels = [study_label(path) for path in paths]
    return ImageFiles(paths, labels, image_size, CLASSES, None, crop_fraction, limit, skip_corrupt)


def study_label(path: Path) -> int:
    """1 for an image of a positive, that is abnormal, study; 0 for one of a negative study."""
    _, _, name = path.parent.name.rpartition("_")
    if name not in CLASSES:
        raise InputError(f"{path}: expected a study's folder that ends in _negative or _positive; move the image away")
    return CLASSES.index(name)
