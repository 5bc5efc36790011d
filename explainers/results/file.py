"""Writes results.json: numbers, settings and commands of evaluations, so that a task is measured once."""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from explainers.results.reading import load
from explainers.results.scores import ImageScores, load_scores, write_scores
from explainers.results.settings import explainers_of, hash_files, settings_of
from explainers.saved.files import is_first_process, write_atomically
from explainers.saved.records import devices, first_difference, versions


class Measured(Protocol):
    """A module after `Trainer.test`, such as `EvaluationModule`."""

    results: dict[str, dict[str, Any]]
    scores: ImageScores | None

    @property
    def columns(self) -> dict[str, str]: ...

    def identity(self) -> dict[str, Any]: ...


class ResultsFile:
    """The results.json of a run, written after every task; earlier numbers with unchanged settings are kept.

    The file holds `results`, `columns`, `identity` (see `EvaluationModule`), `settings` and the fingerprint of the
    `data` of every task, the resolved `config`, the hashes of the `files` that the config names, and `runs`: for each
    command its versions, devices and what it `measured`. If earlier results are dropped, the earlier file is copied to
    results_earlier.json. The numbers of single images are in a file beside it, see `write_scores`.

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
            write_scores(path.with_name("results_earlier.json"), load_scores(path, earlier["results"]))
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
        self.scores = load_scores(path, rows)

    def _unchanged(self, task: str, rows: list[str], earlier: Any, now: Any) -> list[str]:
        """The explainers of a task whose numbers are kept: all if this command does not measure the task."""
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
        """The explainers of a task without numbers; `None` if all have numbers."""
        wanted, kept = list(self.settings[task]["explainers"]), self.kept.get(task, [])
        return None if kept and set(wanted) <= set(kept) else [name for name in wanted if name not in kept]

    def key(self, task: str) -> str:
        """Hash of the settings of what this command measures on a task."""
        settings = self.settings[task]["shared"], self.missing(task), self.settings[task]["explainers"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _earlier_runs(self, earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The records of the earlier commands, without the rows that are measured again."""
        records = []
        for record in earlier.get("runs", ()):
            parts = {
                task: [name for name in names if name in self.kept.get(task, ())]
                for task, names in record.get("measured", {}).items()
            }
            records.append(record | {"measured": {task: names for task, names in parts.items() if names}})
        return [record for record in records if record["measured"]]

    def tell(self) -> None:
        """Print a line for each task with earlier results: what is measured again, and why."""
        if not is_first_process():
            return
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
        if evaluation.scores is not None:
            kept_scores = self.scores.get(task, evaluation.scores)
            self.scores[task] = kept_scores.joined(evaluation.scores).only(rows)
        write_scores(self.path, self.scores)
        write_atomically(self.path, json.dumps(self.content, indent=2))
