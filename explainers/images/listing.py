"""Finds the image files below folders, and warns of other files."""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from PIL import Image

from explainers.errors import InputError
from explainers.images.decoding import formats
from explainers.saved.files import printable

Paths = Sequence[Path]

NAMED = 3
"""Number of files that a message names."""


@cache
def endings() -> frozenset[str]:
    """Endings of the files that are decoded, such as .jpg; .heic where pillow-heif is installed."""
    readable = {*formats(), "MPO"}  # several JPEGs, which are opened as one
    return frozenset(ending for ending, kind in Image.registered_extensions().items() if kind in readable)


def list_images(roots: Paths, arrays: frozenset[str] = frozenset(), beside: Paths = ()) -> list[list[Path]]:
    """List all images below each folder, sorted by folder, then by name; a root that is a file is its only image.

    Files with the endings `arrays` are listed, too. The images in hidden folders `beside` the roots are only counted.

    Warnings count and name what is left out: files that are not decoded, links that lead nowhere, pipes, sockets
    and devices, folders that cannot be read, and images in hidden folders (Jupyter writes .ipynb_checkpoints). Hidden
    files are left out too (macOS writes ._image1.png). Links are followed, but each real folder is visited once, and no
    folder that contains the root.
    """
    listed = [list_files(root) if root.is_dir() else ([root], [], []) for root in roots]
    known = endings() | arrays
    others = {path for files, *_ in listed for path in files if path.suffix.lower() not in known} - set(roots)
    lists = [*(paths for *_, paths in listed), *(list_files(folder)[0] for folder in beside)]
    hidden = [path for paths in lists for path in paths if path.suffix.lower() in known]
    advice = "; for .heic, pip install pillow-heif" * any(path.suffix.lower() in (".heic", ".heif") for path in others)
    kinds = "links that lead nowhere, pipes, sockets, devices, or folders that are closed to you"
    for left, reason in (
        (sorted(others), f"Pillow does not read{advice}"),
        ([path for _, paths, _ in listed for path in paths], f"cannot be read: {kinds}"),
        (hidden, "lie in hidden folders"),
    ):
        if left:
            warnings.warn(f"left out: {several(left)} that {reason}", stacklevel=3)
    return [[path for path in files if path not in others] for files, *_ in listed]


def several(paths: Sequence[Path]) -> str:
    """The number of files, and the names of the first ones.

    >>> several([Path("a/b.txt")]), several([Path("c.mov")] * 5)
    ('1 file (b.txt)', '5 files (c.mov, c.mov, c.mov, ...)')
    """
    return f"{len(paths)} file{'s' * (len(paths) > 1)} ({name_some([path.name for path in paths])})"


def name_some(names: Sequence[str]) -> str:
    """The first names."""
    return ", ".join([*map(printable, names[:NAMED]), *["..."] * (len(names) > NAMED)])


def list_files(root: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """List all files below a folder that are not hidden, the paths that cannot be read, and files in hidden folders."""
    lists: tuple[list[Path], list[Path], list[Path]] = [], [], []
    files, unreadable, hidden = lists
    visited = {str(parent) for parent in Path(root).resolve().parents}
    waiting = [(str(root), files)]
    while waiting:
        folder, found = waiting.pop()
        if (real := os.path.realpath(folder)) in visited:
            continue
        visited.add(real)
        try:
            with os.scandir(folder) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError:
            unreadable.append(Path(folder))
            continue
        subfolders = []
        for entry in entries:
            if _holds(entry.is_dir):  # which asks the disk about links alone
                subfolders.append((entry.path, hidden if entry.name.startswith(".") else found))
            elif not entry.name.startswith("."):
                (found if _holds(entry.is_file) else unreadable).append(Path(entry.path))
        waiting += reversed(subfolders)
    return lists


def _holds(test: Callable[[], bool]) -> bool:
    """What `is_dir` or `is_file` of an entry says; False for a loop of links, for which they raise an error."""
    try:
        return test()
    except OSError:
        return False


def existing_folder(root: str | Path, expected: str) -> Path:
    """Return `root` as a path, or raise an InputError that says what the folder should contain: `expected`."""
    if not Path(root).is_dir():
        raise InputError(f"expected a folder {expected}, got {root}, which is not a folder; correct the path")
    return Path(root)
