"""Reads and writes results.json: numbers, settings and commands of evaluations, so that a task is measured once."""

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from explainers.errors import InputError, check_distinct
from explainers.evaluation.settings import explainers_of, hash_files, settings_of
from explainers.saved.files import printable, write_atomically
from explainers.saved.records import devices, first_difference, versions

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Task → explainer → numbers that `Evaluation` measured."""


COSTS = "images_per_second", "peak_memory", "forward_passes"
"""Numbers that may differ between two measurements of one explainer: by the machine, the batches, or a cache."""


class Measured(Protocol):
    """A module that has been tested, such as `Evaluation`."""

    results: dict[str, dict[str, Any]]

    @property
    def columns(self) -> dict[str, str]: ...

    def identity(self) -> dict[str, Any]: ...


class ResultsFile:
    """The results.json of a run, written after every task; it keeps earlier numbers whose settings are unchanged.

    The file holds `results`, `columns`, `identity` (see `Evaluation`) and `settings` of every task, the fingerprint of
    its `data`, the resolved `config`, the hashes of the `files` that the config names, and `runs`, one record for each
    command, with its versions, devices and what it `measured`. If earlier results are dropped, the earlier file is
    copied to results_earlier.json.

    Args:
        path: path of results.json.
        config: resolved config, in nested dicts.
        data: task → fingerprint of its data set.
        fresh: keep no earlier result.
        processes: number of processes that measure.
    """

    def __init__(
        self, path: Path, config: Any, data: Mapping[str, Any], fresh: bool = False, processes: int = 1
    ) -> None:
        self.path = path
        config, hashes = json.loads(json.dumps(config)), hash_files(config)  # the types that reading the file gives
        earlier = load(path) if path.exists() else {}
        known = {} if fresh else earlier.get("settings", {})
        now = {
            task: {
                "shared": settings_of(task, config, hashes, data.get(task, {}), processes),
                "explainers": explainers_of(task, config, hashes),
            }
            for task in config["tasks"]
        }
        self.changed: dict[str, str] = {}
        self.kept: dict[str, list[str]] = {}
        for task, rows in earlier.get("results", {}).items():
            names = self._unchanged(task, list(rows), known[task], now.get(task)) if task in known else []
            self.kept |= {task: names} if names else {}
        kept = list(self.kept)
        if any(rows.keys() - self.kept.get(task, ()) for task, rows in earlier.get("results", {}).items()):
            write_atomically(path.with_name("results_earlier.json"), path.read_text())
        self.settings = {task: known[task] for task in kept} | now
        record = {"command": sys.argv, "python": platform.python_version()}
        self.record: dict[str, Any] = record | {"packages": versions(), "devices": devices(), "measured": {}}
        tasks = {task: earlier["config"]["tasks"][task] for task in kept if task not in config["tasks"]}
        rows = {task: {name: earlier["results"][task][name] for name in self.kept[task]} for task in kept}
        self.content: dict[str, Any] = {
            "config": config | {"tasks": config["tasks"] | tasks},
            "files": {path: earlier["files"][path] for path in earlier.get("files", {}) if kept} | hashes,
            "data": {task: earlier["data"][task] for task in kept} | {task: data.get(task, {}) for task in now},
            "runs": [*self._earlier_runs(earlier), self.record],
            **{part: {task: earlier[part][task] for task in kept} for part in ("identity", "columns", "settings")},
            "results": rows,
        }

    def _unchanged(self, task: str, rows: list[str], earlier: Any, now: Any) -> list[str]:
        """The explainers of a task whose numbers are kept; all, if this command does not measure the task."""
        if now is None:
            return rows
        difference = first_difference(earlier["shared"], now["shared"])
        if difference:
            self.changed[task] = difference
            return []
        for name in now["explainers"].keys() & earlier["explainers"].keys():
            one, other = ({f"explainers.{name}": settings["explainers"][name]} for settings in (earlier, now))
            difference = first_difference(one, other)
            if difference:
                self.changed[f"{name} on {task}"] = difference
                rows = [row for row in rows if row != name]
        return rows

    def missing(self, task: str) -> list[str] | None:
        """The explainers of a task that are not measured yet; `None` if nothing is left to measure."""
        wanted, kept = list(self.settings[task]["explainers"]), self.kept.get(task, [])
        return None if kept and set(wanted) <= set(kept) else [name for name in wanted if name not in kept]

    def key(self, task: str) -> str:
        """Hash of what the numbers depend on that this command measures."""
        settings = self.settings[task]["shared"], self.missing(task), self.settings[task]["explainers"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _earlier_runs(self, earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The records of the commands that measured what is kept."""
        records = []
        for record in earlier.get("runs", ()):
            parts = {
                task: [name for name in names if name in self.kept.get(task, ())]
                for task, names in record.get("measured", {}).items()
            }
            records.append(record | {"measured": {task: names for task, names in parts.items() if names}})
        return [record for record in records if record["measured"]]

    @rank_zero_only
    def tell(self) -> None:
        """Print a line for each task with earlier results: what is measured again, and why."""
        for task, names in self.kept.items():
            if task in self.settings and names:
                print(f"{task}: not measured again: {', '.join(names)}; {self.path} has it (fresh=true measures all)")
        for what, difference in self.changed.items():
            print(f"{what}: measured again, its settings differ: {difference}")

    def add(self, task: str, evaluation: Measured) -> None:
        """Write the results of a task to the file, beside those that are kept."""
        rows = self.content["results"].get(task, {}) | evaluation.results
        order = [*self.settings[task]["explainers"], *rows]
        rows = {name: rows[name] for name in dict.fromkeys(order) if name in rows}
        kept = self.content["settings"].get(task, {}).get("explainers", {})
        settings = {"shared": self.settings[task]["shared"], "explainers": kept | self.settings[task]["explainers"]}
        parts = {
            "results": rows,
            "columns": evaluation.columns,
            "identity": evaluation.identity(),
            "settings": settings,
        }
        for name, value in parts.items():
            values = self.content[name] | {task: value}
            self.content[name] = {task: values[task] for task in self.content["config"]["tasks"] if task in values}
        self.record["measured"][task] = list(evaluation.results)
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
    for name in [*content["results"], *(name for rows in content["results"].values() for name in rows)]:
        if not name or printable(name) != name:  # it would steer the terminal, or end the writing of a table
            raise InputError(f"{path}: expected names that can be printed, got {ascii(name)}: rename it in the file")
    return content


def read_results(files: Sequence[str | Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """Merge the results of several files; an explainer with equal results in two files is included once.

    IoU@K has the name `iou_<K>`, because files may differ in K.

    Raises:
        InputError: if two files have different results of one explainer on one task, or different settings of a task,
            or a file is listed twice.
    """
    check_distinct(**{"results.files": [str(Path(path).resolve()) for path in files]})
    results: dict[str, dict[str, dict[str, Any]]] = {}
    origin: dict[tuple[str, str], str | Path] = {}
    measured: dict[str, tuple[str | Path, dict[str, Any]]] = {}
    for path in files:
        content = load(path)
        for task, explainers in content["results"].items():
            data = content.get("data", {}).get(task)
            identity = content.get("identity", {}).get(task, {}) | ({"data": data} if data else {})
            reference = content.get("settings", {}).get(task, {}).get("shared", {}).get("reference")
            identity |= {"settings of the reference": reference} if reference else {}
            first, other = measured.setdefault(task, (path, identity))
            _check_alike(f"{task} in {first} and {path}", other, identity)
            measured[task] = first, identity | other
            merged, names = results.setdefault(task, {}), _names(content, task)
            for name, written in explainers.items():
                numbers = {names.get(key, key): value for key, value in written.items()}
                if name in merged and _without_costs(merged[name]) != _without_costs(numbers):
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
        content = load(path)
        for task, columns in content.get("columns", {}).items():
            names = _names(content, task)
            titles |= {names.get(key, key): title for key, title in columns.items()}
    return titles


def _names(content: Mapping[str, Any], task: str) -> dict[str, str]:
    """Number in a file → its name beside those of other files."""
    k = re.fullmatch(r"IoU@(\d+).*", content.get("columns", {}).get(task, {}).get("iou", ""))
    return {"iou": f"iou_{k[1]}", "iou_error": f"iou_{k[1]}_error"} if k else {}


def _check_alike(where: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compare the settings in both identities, except the accuracy: rounding on another device may change a class."""
    shared = sorted((one.keys() & other.keys()) - {"accuracy"})
    difference = first_difference({key: one[key] for key in shared}, {key: other[key] for key in shared})
    if difference:
        raise InputError(f"{where} cannot be compared, they differ in {difference}: measure both alike")


def _without_costs(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in numbers.items() if key not in COSTS}
