"""Looks for the folders and files of a data set before torch is imported, which takes seconds."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from explainers.errors import InputError


def check_places(key: str, settings: Mapping[str, Any], splits: Sequence[str]) -> None:
    """Raise an InputError for the first folder of images, or file for FFCV, that is not there.

    Args:
        key: where the settings of the data set are in the config, such as `data`.
        settings: they themselves.
        splits: the splits that are read: train, val or test.
    """
    if settings.get("download"):
        return
    parts = {key: settings} | {f"{key}.{split}": settings.get(split) for split in splits}
    roots: dict[str, list[str]] = {}
    for place, part in parts.items():
        if isinstance(part, str) and part.endswith(".beton"):
            check_beton_file(place, part)
        elif isinstance(part, Mapping):
            named = {f"{place}.{name}": part[name] for name in ("root", "roots") if name in part}
            roots |= {name: [value] if isinstance(value, str) else [*(value or ())] for name, value in named.items()}
    if roots and not any(roots.values()):
        raise InputError(
            f"expected a folder of images, got none: give {key}.root=my/images, or several as {key}.train.roots=[...]"
            f" and {key}.val.roots=[...]"
        )
    for name, paths in roots.items():
        for path in paths:
            if not os.path.exists(path):
                raise InputError(f"expected a folder of images, got {name}={path}: there is none; correct the path")


INSTALL_FFCV = "run `make ffcv`, or use a torch loader such as data=imagenet_folder"


def check_beton_file(name: str, path: str) -> None:
    """Raise an InputError if a file for FFCV is missing, or FFCV itself, whose import takes ten seconds."""
    if find_spec("ffcv") is None:
        raise InputError(f"FFCV is not installed: {INSTALL_FFCV}")
    if not os.path.isfile(path):
        raise InputError(f"expected a .beton file, got {name}={path}: there is none; write it: {write_command(path)}")


def write_command(path: str | os.PathLike[str]) -> str:
    """The command that writes a .beton."""
    return f"python -m datamodules.write_beton <image folder> {path} --model <name in timm>"
