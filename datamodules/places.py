"""Looks for the folders and files of a data set before torch is imported, which takes seconds."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from shlex import quote
from typing import Any

from explainers.errors import InputError


def check_places(key: str, settings: Mapping[str, Any], splits: Sequence[str], model: str | None = None) -> None:
    """Raise an InputError for the first folder of images, or file for FFCV, that is not there.

    Args:
        key: where the settings of the data set are in the config, such as `data`.
        settings: they themselves.
        splits: the splits that are read: train, val or test.
        model: name in timm of the model whose images a file for FFCV holds.
    """
    if settings.get("download"):
        return
    parts = {key: settings} | {f"{key}.{split}": settings.get(split) for split in splits}
    roots: dict[str, list[str]] = {}
    for place, part in parts.items():
        if isinstance(part, str) and part.endswith(".beton"):
            check_beton_file(place, part, model, settings.get("crop_fraction"))
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


def check_beton_file(name: str, path: str, model: str | None, crop_fraction: float | None) -> None:
    """Raise an InputError if a file for FFCV is missing, or FFCV itself, whose import takes ten seconds."""
    if find_spec("ffcv") is None:
        raise InputError(f"FFCV is not installed: {INSTALL_FFCV}")
    if not os.path.isfile(path):
        command = write_command(path, model, crop_fraction)
        raise InputError(f"expected a .beton file, got {name}={path}: there is none; write it: {command}")


def write_command(path: str | os.PathLike[str], model: str | None = None, crop_fraction: float | None = None) -> str:
    """The command that writes a .beton of a folder of the same name.

    >>> write_command("a/train.beton", "test_vit", 0.875)
    'python -m datamodules.write_beton a/train a/train.beton --model test_vit --crop-fraction 0.875'
    """
    crop = "" if crop_fraction is None else f" --crop-fraction {crop_fraction:g}"
    folder, file = quote(os.fspath(path).removesuffix(".beton")), quote(os.fspath(path))
    return f"python -m datamodules.write_beton {folder} {file} --model {model or '<name in timm>'}{crop}"
