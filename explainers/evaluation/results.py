"""Reads and writes results.json: numbers, settings and commands of evaluations, so that a task is measured once."""

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from explainers.errors import InputError
from explainers.files import write_atomically
from explainers.records import devices, first_difference, versions

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Task → explainer → numbers that `Evaluation` measured."""

WEIGHTS = ("weights", "head", "checkpoint_path", "mae")
"""Config keys that name files; the hash of the file is compared, not its path."""

WITHOUT_EFFECT = ("chunk_size", "num_workers")
"""Config keys that depend on the machine and do not change the numbers."""


def settings_of(task: str, config: Mapping[str, Any], hashes: Mapping[str, str]) -> dict[str, Any]:
    """The part of a resolved config that the numbers of a task depend on.

    It leaves out other tasks, figures and the locations of data and weights.

    >>> config = {"data_dir": "/disk", "target": {"head": "a/head.safetensors"}, "trainer": {"precision": "32-true"}}
    >>> config["tasks"] = {"pets": {"root": "/disk/pets", "num_workers": 2}, "cars": {}}
    >>> settings = settings_of("pets", config, hashes={"a/head.safetensors": "5d41"})
    >>> settings["target"], settings["task"]
    ({'head': '5d41'}, {'root': 'pets'})

    Args:
        task: name of the task.
        config: resolved config, in nested dicts.
        hashes: path → SHA-256 of the files that the config names, see `hash_files`.
    """
    roots = tuple(f"{config[key].rstrip('/')}/" for key in ("data_dir", "cache_dir") if config.get(key))

    def reduced(node: Any, key: str = "") -> Any:
        if isinstance(node, Mapping):
            return {name: reduced(value, name) for name, value in node.items() if name not in WITHOUT_EFFECT}
        if not isinstance(node, str):
            return node
        if key in WEIGHTS:
            return hashes.get(node, node)
        return next((node.removeprefix(root) for root in roots if node.startswith(root)), node)

    shared = {key: config.get(key) for key in ("target", "grid", "explainers", "evaluation", "seed")}
    shared |= {"methods": config["methods"]} if config.get("methods") else {}
    trainer = {key: config["trainer"].get(key) for key in ("precision", "limit_test_batches", "fast_dev_run")}
    return reduced({**shared, "trainer": trainer, "task": config["tasks"][task]})


def hash_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Path → SHA-256 of every file that a key of `WEIGHTS` names, at any depth of the config."""

    def paths(node: Any, key: str = "") -> Iterator[str]:
        if isinstance(node, Mapping):
            for name, value in node.items():
                yield from paths(value, name)
        elif key in WEIGHTS and isinstance(node, str) and Path(node).is_file():
            yield node

    hashes = {}
    for path in sorted(set(paths(config))):
        with open(path, "rb") as file:
            hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


class Measured(Protocol):
    """A module that has been tested, such as `Evaluation`."""

    results: dict[str, dict[str, Any]]

    @property
    def columns(self) -> dict[str, str]: ...

    def identity(self) -> dict[str, Any]: ...


class ResultsFile:
    """The results.json of a run, written after every task; it keeps earlier tasks whose settings are unchanged.

    The file holds `results`, `columns` and `identity` of every task (see `Evaluation`), the resolved `config`, the
    hashes of the `files` that the config names, and `runs`, one record for each command, with its versions, devices and
    measured `tasks`. If earlier results are dropped, the earlier file is copied to results_earlier.json.

    Args:
        path: path of results.json.
        config: resolved config, in nested dicts.
        fresh: keep no earlier task.
    """

    def __init__(self, path: Path, config: Any, fresh: bool = False) -> None:
        self.path = path
        config, hashes = json.loads(json.dumps(config)), hash_files(config)  # the types that reading the file gives
        earlier = load(path) if path.exists() else {}
        known = {} if fresh else earlier.get("config", {}).get("tasks", {})
        tasks = known | config["tasks"]
        self.kept: list[str] = []
        self.changed: dict[str, str] = {}
        for task in [name for name in earlier.get("results", {}) if name in known]:
            difference = first_difference(
                settings_of(task, earlier["config"], earlier["files"]),
                settings_of(task, config | {"tasks": tasks}, earlier["files"] | hashes),
            )
            if difference:
                self.changed[task] = difference
            else:
                self.kept.append(task)
        if earlier.get("results", {}).keys() - self.kept:
            write_atomically(path.with_name("results_earlier.json"), path.read_text())
        record = {"command": sys.argv, "python": platform.python_version()}
        self.record: dict[str, Any] = record | {"packages": versions(), "devices": devices(), "tasks": []}
        self.content: dict[str, Any] = {
            "config": config | {"tasks": {name: tasks[name] for name in [*config["tasks"], *self.kept]}},
            "files": {path: earlier["files"][path] for path in earlier.get("files", {}) if self.kept} | hashes,
            "runs": [*self._earlier_runs(earlier), self.record],
            **{part: {task: earlier[part][task] for task in self.kept} for part in ("identity", "columns", "results")},
        }

    def _earlier_runs(self, earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The records of the commands that measured the kept tasks."""
        records = [
            record | {"tasks": [t for t in record["tasks"] if t in self.kept]} for record in earlier.get("runs", ())
        ]
        return [record for record in records if record["tasks"]]

    @rank_zero_only
    def tell(self) -> None:
        """Print a line for each task with earlier results: whether it is measured again, and why."""
        for task in self.kept:
            print(f"{task}: not measured again, {self.path} has it (fresh=true measures all)")
        for task, difference in self.changed.items():
            print(f"{task}: measured again, its settings differ: {difference}")

    def add(self, task: str, evaluation: Measured) -> None:
        """Write the results of a task to the file."""
        parts = {"results": evaluation.results, "columns": evaluation.columns, "identity": evaluation.identity()}
        for name, value in parts.items():
            values = self.content[name] | {task: value}
            self.content[name] = {task: values[task] for task in self.content["config"]["tasks"] if task in values}
        self.record["tasks"].append(task)
        write_atomically(self.path, json.dumps(self.content, indent=2))


def load(path: str | Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        InputError: if there is no file, or it is not a results file.
    """
    if not Path(path).is_file():
        raise InputError(f"no results at {path}: measure first, with `python eval.py`, or correct results.files")
    text = Path(path).read_text()
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: expected the results.json of an evaluation, got no JSON ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise InputError(f"{path}: expected the results.json of an evaluation, got JSON without results of tasks")
    return content


def read_results(files: Sequence[str | Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """Merge the results of several files; an explainer with equal results in two files is included once.

    Raises:
        InputError: if two files have different results of one explainer on one task, or different settings of a task.
    """
    results: dict[str, dict[str, dict[str, Any]]] = {}
    origin: dict[tuple[str, str], str | Path] = {}
    measured: dict[str, tuple[str | Path, dict[str, Any]]] = {}
    for path in files:
        content = load(path)
        for task, explainers in content["results"].items():
            identity = content.get("identity", {}).get(task, {})
            first, other = measured.setdefault(task, (path, identity))
            _check_alike(f"{task} in {first} and {path}", other, identity)
            merged = results.setdefault(task, {})
            for name, numbers in explainers.items():
                if name in merged and _without_speed(merged[name]) != _without_speed(numbers):
                    raise InputError(
                        f"expected one result of {name} on {task}, got two, in {origin[task, name]} and {path}: "
                        "leave a file out, or measure one of them under another name (+explainer@explainers.<name>=...)"
                    )
                origin.setdefault((task, name), path)
                merged.setdefault(name, numbers)
    return results


def read_columns(files: Sequence[str | Path]) -> dict[str, str]:
    """Number → column title of several files, in the order of the columns."""
    titles: dict[str, str] = {}
    for path in files:
        for columns in load(path).get("columns", {}).values():
            titles |= columns
    return titles


def _check_alike(where: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compare the settings in both identities, except the accuracy: rounding on another device may change a class."""
    shared = sorted((one.keys() & other.keys()) - {"accuracy"})
    difference = first_difference({key: one[key] for key in shared}, {key: other[key] for key in shared})
    if difference:
        raise InputError(f"{where} cannot be compared, they differ in {difference}: measure both alike")


def _without_speed(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in numbers.items() if key != "images_per_second"}
