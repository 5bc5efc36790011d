"""Writes results.json: numbers, settings and commands of evaluations, so that a task is measured once."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from explainers.errors import check_distinct
from explainers.posthoc.names import label_methods
from explainers.results.reading import load, load_scores, write_scores
from explainers.saved.files import file_hashes, is_first_process, write_atomically
from explainers.saved.identity import WITHOUT_EFFECT, first_difference
from explainers.saved.records import devices, leaves, versions

NOT_MEASURED = {
    "name": "names the folder",
    "fresh": "measures what is there already",
    "results": "files that tables are made of",
    "reference": "published values in tables",
    "differences": "made of results",
    "figures": "made of results",
    "summary": "made of results",
    "pictures": "pictures",
    "overlays": "pictures",
    "progress": "shown while measuring",
    "logger": "copies of the results",
    "data_dir": "where data are; their contents count",
    "cache_dir": "where results are that are computed where they are missing",
    "tasks": "other tasks; the settings of the task itself count",
    "trainer.accelerator": "devices compute the same, up to rounding",
    "trainer.devices": "processes measure as one; their number counts under a limit of batches",
    "trainer.num_nodes": "processes measure as one; their number counts under a limit of batches",
    "trainer.strategy": "processes measure as one",
    "trainer.profiler": "shown after measuring",
    "trainer.enable_model_summary": "shown before measuring",
    "trainer.enable_progress_bar": "shown while measuring",
    "trainer.default_root_dir": "where files of libraries are",
}
"""Config keys that change no number of a task, and why; so do the keys in `identity.WITHOUT_EFFECT`."""

BATCHES = ("batch_size", "eval_batch_size")
"""Config keys of data sets that change the measured speed, and the images under `trainer.limit_test_batches`."""

EXPLAINERS = ("explainers", "methods")
"""Config keys of explainers; a row of a table depends on the keys of its own explainer alone."""


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
        config, data = json.loads(json.dumps([config, data]))  # the types that reading the file gives
        hashes = hash_files(config)
        earlier = load(path) if path.exists() else {}
        known = {} if fresh else earlier.get("settings", {})
        now = {
            task: {
                "shared": list_settings(task, config, hashes, data.get(task, {}), processes),
                "explainers": list_explainers(task, config, hashes),
            }
            for task in config["tasks"]
        }
        self.changed: dict[str, str] = {}
        self.kept: dict[str, list[str]] = {}
        for task, rows in earlier.get("results", {}).items():
            names = self._find_unchanged(task, list(rows), known[task], now.get(task)) if task in known else []
            self.kept |= {task: names} if names else {}
        kept = list(self.kept)
        if any(rows.keys() - self.kept.get(task, ()) for task, rows in earlier.get("results", {}).items()):
            write_atomically(path.with_name("results_earlier.json"), path.read_text(encoding="utf-8"))
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

    def _find_unchanged(self, task: str, rows: list[str], earlier: Any, now: Any) -> list[str]:
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

    def print_changes(self) -> None:
        """Print a line for each task with earlier results: what is measured again, and why."""
        if not is_first_process():
            return
        for task, names in self.kept.items():
            print(f"{task}: not measured again: {', '.join(names)}; {self.path} has it (fresh=true measures all)")
        for what, difference in self.changed.items():
            print(f"{what}: measured again, its settings differ: {difference}")

    def add(self, task: str, evaluation: Any) -> None:
        """Write the results of a task, an `EvaluationModule` after its test, beside those that are kept."""
        rows = self.content["results"].get(task, {}) | evaluation.results
        order = [*self.settings[task]["explainers"], *rows]
        rows = {name: rows[name] for name in dict.fromkeys(order) if name in rows}
        kept = self.content["settings"].get(task, {}).get("explainers", {})
        settings = {"shared": self.settings[task]["shared"], "explainers": kept | self.settings[task]["explainers"]}
        parts = {"columns": evaluation.columns, "identity": evaluation.identity()}
        for name, value in {"results": rows, **parts, "settings": settings}.items():
            values = self.content[name] | {task: value}
            self.content[name] = {task: values[task] for task in self.content["config"]["tasks"] if task in values}
        self.record["measured"][task] = list(evaluation.results)
        if evaluation.scores is not None:
            kept_scores = self.scores.get(task, evaluation.scores)
            self.scores[task] = kept_scores.joined(evaluation.scores).only(rows)
        write_scores(self.path, self.scores)
        write_atomically(self.path, json.dumps(self.content, indent=2))


def list_settings(
    task: str, config: Mapping[str, Any], hashes: Mapping[str, str], data: Mapping[str, Any], processes: int = 1
) -> dict[str, Any]:
    """The settings that all numbers of a task depend on, for every explainer.

    They are the resolved config without the explainers and the keys in `NOT_MEASURED`. Paths of files are replaced by
    hashes, and the data set by its fingerprint. The settings of the reference explainer are added, and the number of
    processes if the trainer limits the batches of each process.

    >>> config = {"name": "run", "data_dir": "/disk", "target": {"head": "a/head.safetensors"}, "seed": 0}
    >>> config["tasks"] = {"pets": {"data": {"root": "/disk/pets", "batch_size": 8}, "target": None}, "cars": {}}
    >>> list_settings("pets", config, hashes={"a/head.safetensors": "5d41"}, data={"images": 12})
    {'target': {'head': '5d41'}, 'seed': 0, 'task': {'target': None}, 'data': {'images': 12, 'batch_size': 8}}

    Args:
        task: name of the task.
        config: resolved config, in nested dicts.
        hashes: see `hash_files`.
        data: fingerprint of the task's data set.
        processes: number of processes that measure.
    """
    shared = {key: value for key, value in config.items() if key not in EXPLAINERS}
    own = {key: value for key, value in config["tasks"][task].items() if key not in EXPLAINERS}
    loader = own.pop("data", None) or {}
    batches = {key: loader[key] for key in BATCHES if key in loader}
    reference = (config.get("evaluation") or {}).get("reference")
    compared = {"reference": list_explainers(task, config, hashes).get(reference)} if reference else {}
    settings = {"task": _reduce(own, config, hashes, "task"), "data": {**data, **batches}}
    trainer = config.get("trainer") or {}
    limit = trainer.get("limit_test_batches")
    whole = limit is None or isinstance(limit, float) and limit == 1  # 1.0 is all batches, 1 is a single one
    divided = {} if whole and not trainer.get("fast_dev_run") else {"processes": processes}
    return {**_reduce(shared, config, hashes), **settings, **compared, **divided}


def list_explainers(task: str, config: Mapping[str, Any], hashes: Mapping[str, str]) -> dict[str, Any]:
    """Settings of each explainer of a task, learned ones and methods, in their order; see `list_settings`.

    >>> config = {"explainers": {"tve": {"hops": [1]}}, "methods": [{"RISE": {"masks": 8}}], "tasks": {"pets": {}}}
    >>> list_explainers("pets", config, {})
    {'tve': {'hops': [1]}, 'RISE(masks=8)': {'RISE': {'masks': 8}}}
    """
    own = config["tasks"][task].get("explainers") or {}
    nodes = {name: [node, own.get(name)] if own.get(name) else node for name, node in config["explainers"].items()}
    nodes |= {name: [None, node] for name, node in own.items() if name not in nodes}
    methods = {label: {name: options} for label, (name, options) in label_methods(config.get("methods") or ()).items()}
    check_distinct(**{"explainers and methods": [*nodes, *methods]})
    return {name: _reduce(node, config, hashes, f"explainers.{name}") for name, node in (nodes | methods).items()}


def row_keys(settings: Mapping[str, Any]) -> dict[str, str]:
    """Explainer → hash of the settings that its numbers and heatmaps depend on.

    Args:
        settings: entry of a task in results.json: settings `shared` by all rows, and of each of the `explainers`.
    """
    shared = settings.get("shared")
    texts = {name: json.dumps([shared, own], sort_keys=True) for name, own in settings.get("explainers", {}).items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def _reduce(node: Any, config: Mapping[str, Any], hashes: Mapping[str, str], path: str = "") -> Any:
    """A part of the config without keys that change no number; paths of files are replaced by hashes."""
    if isinstance(node, Mapping):
        within = {name: f"{path}.{name}".lstrip(".") for name in node}
        kept = [name for name in node if name not in WITHOUT_EFFECT and within[name] not in NOT_MEASURED]
        return {name: _reduce(node[name], config, hashes, within[name]) for name in kept}
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [_reduce(item, config, hashes, path) for item in node]
    if isinstance(node, str):
        roots = tuple(f"{config[key].rstrip('/')}/" for key in ("data_dir", "cache_dir") if config.get(key))
        return hashes.get(node, next((node.removeprefix(root) for root in roots if node.startswith(root)), node))
    return node


def hash_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Path → SHA-256 of every file in the config that numbers depend on; of data sets, their own fingerprints count."""
    placed = {**config, "data_dir": None, "cache_dir": None}
    settings = [[list_settings(task, placed, {}, {}), list_explainers(task, placed, {})] for task in config["tasks"]]
    paths = sorted({text for _, text in leaves(settings) if isinstance(text, str) and os.path.isfile(text)})
    return dict(zip(paths, file_hashes(paths), strict=True))
