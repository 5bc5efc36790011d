"""Reads and writes results.json: numbers, settings and commands of evaluations, so that a task is measured once."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from explainers.errors import InputError
from explainers.evaluation.settings import hash_files, settings_of
from explainers.files import write_atomically
from explainers.records import devices, first_difference, versions

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Task → explainer → numbers that `Evaluation` measured."""


class Measured(Protocol):
    """A module that has been tested, such as `Evaluation`."""

    results: dict[str, dict[str, Any]]

    @property
    def columns(self) -> dict[str, str]: ...

    def identity(self) -> dict[str, Any]: ...


class ResultsFile:
    """The results.json of a run, written after every task; it keeps earlier tasks whose settings are unchanged.

    The file holds `results`, `columns` and `identity` of every task (see `Evaluation`), the fingerprint of its `data`,
    the resolved `config`, the hashes of the `files` that the config names, and `runs`, one record for each command,
    with its versions, devices and measured `tasks`. If earlier results are dropped, the earlier file is copied to
    results_earlier.json.

    Args:
        path: path of results.json.
        config: resolved config, in nested dicts.
        data: task → fingerprint of its data set.
        fresh: keep no earlier task.
    """

    def __init__(self, path: Path, config: Any, data: Mapping[str, Any], fresh: bool = False) -> None:
        self.path = path
        config, hashes = json.loads(json.dumps(config)), hash_files(config)  # the types that reading the file gives
        earlier = load(path) if path.exists() else {}
        known = {} if fresh else earlier.get("config", {}).get("tasks", {})
        tasks, data = known | config["tasks"], {**earlier.get("data", {}), **data}
        self.kept: list[str] = []
        self.changed: dict[str, str] = {}
        for task in [name for name in earlier.get("results", {}) if name in known]:
            difference = first_difference(
                settings_of(task, earlier["config"], earlier["files"], earlier.get("data", {}).get(task, {})),
                settings_of(task, config | {"tasks": tasks}, earlier["files"] | hashes, data.get(task, {})),
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
            "data": {name: data.get(name, {}) for name in [*config["tasks"], *self.kept]},
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
            data = content.get("data", {}).get(task)
            identity = content.get("identity", {}).get(task, {}) | ({"data": data} if data else {})
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
