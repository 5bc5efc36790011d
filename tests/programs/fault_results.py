"""The results that a command leaves in a folder, read so that two folders can be compared and damage is seen."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file

HISTORY = "run/csv/version_0/metrics.csv"
"""The only result that grows while a command runs: rows of a later epoch are left out when the command runs again."""

NO_RESULTS = {".lock": "of the run", ".filler": "of `faults.py`", "hparams.yaml": "a copy of config.yaml, by Lightning"}
"""Files that are not compared, and why."""

Parts = dict[str, Any]
"""Name of a result, such as a file, a row of a store or a task → its content."""


class Torn(Exception):
    """A result that is there and not whole."""


def parts(place: Path) -> Parts:
    """Read all results in a place; what a command reads, and files with names of unfinished ones, are left out.

    Raises:
        Torn: if a file cannot be read; the message names it.
    """
    found: Parts = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if not path.is_file() or name.startswith(("inputs/", "home/")) or path.name in NO_RESULTS or unfinished(path):
            continue
        try:
            found |= READERS.get(path.suffix, _nothing)(name, path)
        except Exception as error:  # whatever a reader makes of a damaged file
            raise Torn(f"{name}: {type(error).__name__}: {error}") from error
    return found


def unfinished(path: Path) -> bool:
    """Whether a file has the name of an unfinished one."""
    return ".unfinished" in path.name or path.suffix == ".partial"


def differences(found: Parts, expected: Parts, whole: bool) -> list[str]:
    """Names of the results that are not the expected ones.

    Args:
        found: the results of a disturbed command.
        expected: those of an undisturbed one.
        whole: the command has ended: none may be missing.
    """
    names = found.keys() | expected.keys() if whole else found.keys() - {HISTORY}
    return sorted(name for name in names if name not in found or found[name] != expected.get(name))


def _bytes(name: str, path: Path) -> Parts:
    return {name: path.read_bytes()}


def _safetensors(name: str, path: Path) -> Parts:
    """The bytes of weights; the scores of images by task, because they are written after each."""
    if not path.stem.endswith("_scores"):
        return _bytes(name, path)
    scores = load_file(path)
    tasks = {key.partition("/")[0] for key in scores}
    return {
        f"{name}: {task}": {key: scores[key].numpy().tobytes() for key in scores if key.startswith(f"{task}/")}
        for task in tasks
    }


def _config(name: str, path: Path) -> Parts:
    return {name: OmegaConf.to_container(OmegaConf.load(path))}


def _json(name: str, path: Path) -> Parts:
    content = json.loads(path.read_text())
    if name == "run/versions.json":  # with the command
        return {name: sorted(content)}
    if path.name == "images.beton.json":
        return {name: content["classes"]}  # the rest depends on where the samples are, see `_beton`
    if path.name != "results.json":
        return {name: _without_speed(content)}
    tasks = content["results"].items()
    return {f"{name}: {task}": {who: _without_speed(row) for who, row in rows.items()} for task, rows in tasks}


def _without_speed(numbers: Parts) -> Parts:
    return {name: value for name, value in numbers.items() if not name.endswith("images_per_second")}


def _table(name: str, path: Path) -> Parts:
    lines = path.read_text().splitlines(keepends=True)
    if name == HISTORY and lines and not lines[-1].endswith("\n"):
        lines.pop()  # cut, and removed when the command runs again
    header, *rows = csv.reader(lines)
    assert all(len(row) == len(header) for row in rows), "a row with another number of cells than the header"
    if "train/loss" not in header:
        return {}  # a copy of results.json, or a table of it with speeds
    return {name: [_without_speed(dict(zip(header, row, strict=True))) for row in rows]}


def _rows(name: str, path: Path) -> Parts:
    """The rows of a store that are marked as done."""
    if path.name != "done.npy":
        return {}
    arrays = {other.stem: np.load(other) for other in path.parent.glob("*.npy") if other != path}
    store = name.removesuffix("/done.npy")
    done = np.flatnonzero(np.load(path) == 1)  # 2 marks a corrupt image
    return {f"{store}: {array} {row}": arrays[array][row].tobytes() for array in arrays for row in done}


def _checkpoint(name: str, path: Path) -> Parts:
    torch.load(path, map_location="cpu", weights_only=True)
    return {}


def _picture(name: str, path: Path) -> Parts:
    with Image.open(path) as picture:
        picture.load()
    return {}


def _beton(name: str, path: Path) -> Parts:
    """The samples by index: label, and the bytes of the image. Where in the file they are depends on the processes."""
    from ffcv import types

    from datamodules.beton import check_beton

    check_beton(path)
    header = np.fromfile(path, types.HeaderType, count=1)[0]
    start = types.HeaderType.itemsize
    fields = np.fromfile(path, types.FieldDescType, int(header["num_fields"]), offset=start)
    sample = types.get_metadata_type(types.get_handlers(fields))
    samples = np.fromfile(path, sample, int(header["num_samples"]), offset=start + fields.nbytes)
    regions = np.fromfile(path, types.ALLOC_TABLE_TYPE, offset=int(header["alloc_table_ptr"]))
    sizes, content = dict(zip(regions["ptr"].tolist(), regions["size"].tolist(), strict=True)), path.read_bytes()
    found = {}
    for image, label, index in samples.tolist():
        pointer = image[-1]
        found[f"{name}: {index}"] = label, content[pointer : pointer + sizes[pointer]]
    return found


def _nothing(name: str, path: Path) -> Parts:
    return {}


READERS: dict[str, Callable[[str, Path], Parts]] = {
    ".safetensors": _safetensors,
    ".yaml": _config,
    ".json": _json,
    ".csv": _table,
    ".npy": _rows,
    ".ckpt": _checkpoint,
    ".png": _picture,
    ".beton": _beton,
}
"""Suffix of a file → what reads its results, given its name and its path."""
