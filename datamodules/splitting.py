"""The splits of one's own folder of images: its subfolders train/ and val/; without them, every tenth image."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from explainers.errors import InputError

File = TypeVar("File")

TENTH = 10
"""Of a folder without subfolders for the splits, one image in so many is for validation."""


def own_folder(root: str | Path, train: str, val: str, split: str) -> tuple[Path, bool | None]:
    """Find the images of a split.

    Args:
        root: folder of the images of all splits.
        train: name of the subfolder with the training images.
        val: name of the subfolder with the validation images.
        split: name of the subfolder to find.

    Returns:
        A folder, and which of its images, see `part_of`.

    Raises:
        InputError: if there is a subfolder for training, and none for validation.
    """
    folders = [Path(root, train).is_dir(), Path(root, val).is_dir()]
    if folders == [True, False]:
        raise InputError(
            f"expected {train}/ and {val}/ in {root}, or neither, got {train}/ alone: add {val}/, or move the images of"
            f" {train}/ up, of which every tenth is then for validation"
        )
    return (Path(root, split), None) if any(folders) else (Path(root), split != train)


def part_of(files: Sequence[File], held_out: bool | None, root: str | Path) -> Sequence[File]:
    """Every tenth file, the other ones, or all.

    >>> part_of(range(20), False, "photos")[-3:], part_of(range(3), None, "photos")
    ([16, 17, 18], range(0, 3))

    Args:
        files: the files of all splits, sorted by name.
        held_out: True for the files that are held out for validation, False for the others; `None` for all.
        root: their folder, for messages.

    Raises:
        InputError: if there are too few files to hold some out.
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
