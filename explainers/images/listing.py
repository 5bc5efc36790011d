"""Finds the image files below folders, and warns of other files."""

import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from PIL import Image

from explainers.errors import InputError
from explainers.images.decoding import formats
from explainers.saved.files import printable

NAMED = 3
"""Number of files that a message names."""


@cache
def endings() -> frozenset[str]:
    """Endings of the files that are decoded, such as .jpg; .heic where pillow-heif is installed."""
    readable = {*formats(), "MPO"}  # several JPEGs, which are opened as one
    return frozenset(ending for ending, kind in Image.registered_extensions().items() if kind in readable)


def list_images(roots: Sequence[Path]) -> list[list[Path]]:
    """List all images below each folder, sorted by folder, then by name.

    One warning counts and names the files that are not decoded. Hidden files are left out (macOS writes
    ._image1.png). Links are followed, but each real folder is visited once, and no folder that contains the root.

    Args:
        roots: folders, or files of single images.

    Returns:
        The images of each root; a root that is a file is its only image.
    """
    files = [list_files(root) if root.is_dir() else [root] for root in roots]
    others = [path for paths in files for path in paths if path.suffix.lower() not in endings() and path not in roots]
    if others:
        heif = any(path.suffix.lower() in (".heic", ".heif") for path in others)
        advice = "; for .heic, pip install pillow-heif" if heif else ""
        warnings.warn(f"left out: {several(others)} that Pillow does not read{advice}", stacklevel=3)
    left_out = set(others)
    return [[path for path in paths if path not in left_out] for paths in files]


def several(paths: Sequence[Path]) -> str:
    """The number of files, and the names of the first ones.

    >>> several([Path("a/b.txt")]), several([Path("c.mov")] * 5)
    ('1 file (b.txt)', '5 files (c.mov, c.mov, c.mov, ...)')
    """
    names = ", ".join([printable(path.name) for path in paths[:NAMED]] + ["..."] * (len(paths) > NAMED))
    return f"{len(paths)} file{'s' * (len(paths) > 1)} ({names})"


def list_files(root: Path) -> list[Path]:
    """List all files below a folder that are not hidden, see `list_images`."""
    paths: list[Path] = []
    visited = {str(parent) for parent in Path(root).resolve().parents}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:
            subfolders.clear()
            continue
        visited.add(real)
        subfolders.sort()
        paths += [Path(folder, name) for name in sorted(files) if not name.startswith(".")]
    return paths


def existing_folder(root: str | Path, expected: str) -> Path:
    """Return `root` as a path.

    Args:
        root: the folder.
        expected: what it should contain, for the message.

    Raises:
        InputError: if it is not a folder.
    """
    if not Path(root).is_dir():
        raise InputError(f"expected a folder {expected}, got {root}, which is not a folder; correct the path")
    return Path(root)
