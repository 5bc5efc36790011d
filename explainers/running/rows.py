"""The rows that an evaluation measures: the settings that each depends on, by which it is found again."""

from __future__ import annotations  # so that a row's room, which imports Lightning, is imported when rows are listed

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explainers.errors import check_distinct
from explainers.running.record import leave_out
from explainers.saved.files import file_hashes, is_first_process
from explainers.saved.records import leaves

if TYPE_CHECKING:
    from explainers.report.results import Row

NOT_MEASURED = (
    *("name", "data_dir", "cache_dir", "trainer.default_root_dir"),  # where files are; their contents count
    *("fresh", "tasks", "explainers", "methods"),  # what is measured; a row has the settings of its own
    *("results", "reference", "differences", "figures", "summary", "pictures", "overlays"),  # made of results
    *("progress", "logger", "trainer.profiler", "trainer.enable_model_summary", "trainer.enable_progress_bar"),  # shown
    *(f"trainer.{name}" for name in ("accelerator", "devices", "num_nodes", "strategy")),  # processes measure as one
)
"""Config keys that change no number, as do the keys in `identity.WITHOUT_EFFECT`; any other key counts."""

BATCHES = ("batch_size", "eval_batch_size")
"""Config keys of data sets that change the measured speed, and the images under `trainer.limit_test_batches`."""


def list_rows(
    folder: Path, config: Mapping[str, Any], data: Mapping[str, Any], hashes: Mapping[str, str], processes: int
) -> dict[str, list[Row]]:
    """Task → its rows, in the order of the config.

    Args:
        folder: folder of the run.
        config: resolved config, in nested dicts.
        data: task → fingerprint of its data set.
        hashes: see `hash_files`.
        processes: number of processes that measure.
    """
    from explainers.report.results import Row

    rows = {}
    for task in config["tasks"]:
        settings = list_settings(task, config, data[task], hashes, processes)
        rows[task] = [Row(folder, task, name, json.loads(json.dumps(own))) for name, own in settings.items()]
    return rows


def list_settings(
    task: str, config: Mapping[str, Any], data: Mapping[str, Any], hashes: Mapping[str, str], processes: int = 1
) -> dict[str, dict[str, Any]]:
    """Explainer → all that its numbers on a task depend on; for arguments see `list_rows`.

    Settings are the resolved config without the keys in `NOT_MEASURED`. Paths of files are replaced by hashes, and the
    data set by its fingerprint. The settings of the reference explainer are added, and the number of processes if the
    trainer limits the batches of each process.
    """
    explainers = list_explainers(task, config)
    shared = {**leave_out(config, NOT_MEASURED), "task": leave_out(config["tasks"][task], ["data", "explainers"])}
    reference = (config.get("evaluation") or {}).get("reference")
    if reference:
        shared["reference"] = explainers.get(reference)
    trainer = config.get("trainer") or {}
    limit = trainer.get("limit_test_batches")
    whole = limit is None or isinstance(limit, float) and limit == 1  # 1.0 is all batches, 1 is a single one
    if not whole or trainer.get("fast_dev_run"):
        shared["processes"] = processes
    loader = config["tasks"][task].get("data") or {}
    fingerprint = {**data, **{key: loader[key] for key in BATCHES if key in loader}}
    roots = tuple(f"{config[key].rstrip('/')}/" for key in ("data_dir", "cache_dir") if config.get(key))
    return {
        name: {**_place({"explainers": {name: node}, **shared}, roots, hashes), "data": fingerprint}
        for name, node in explainers.items()
    }


def list_explainers(task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of each explainer of a task, learned ones and methods, in their order."""
    from explainers.posthoc.names import label_methods

    own = config["tasks"][task].get("explainers") or {}
    nodes = {name: [node, own.get(name)] if own.get(name) else node for name, node in config["explainers"].items()}
    nodes |= {name: [None, node] for name, node in own.items() if name not in nodes}
    methods = {label: {name: options} for label, (name, options) in label_methods(config.get("methods") or ()).items()}
    check_distinct(**{"explainers and methods": [*nodes, *methods]})
    return nodes | methods


def hash_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Path → SHA-256 of every file in the config that numbers depend on; of data sets, their own fingerprints count."""
    drawn = [key for key in NOT_MEASURED if key not in ("explainers", "methods", "tasks")]
    tasks = {task: leave_out(node, ["data"]) for task, node in config["tasks"].items()}
    texts = {text for _, text in leaves({**leave_out(config, drawn), "tasks": tasks}) if isinstance(text, str)}
    paths = sorted(filter(os.path.isfile, texts))
    return dict(zip(paths, file_hashes(paths), strict=True))


def _place(node: Any, roots: tuple[str, ...], hashes: Mapping[str, str]) -> Any:
    """A part of the config without keys `WITHOUT_EFFECT`, with hashes of files, and paths relative to the roots."""
    from explainers.saved.identity import WITHOUT_EFFECT

    if isinstance(node, Mapping):
        return {name: _place(own, roots, hashes) for name, own in node.items() if name not in WITHOUT_EFFECT}
    if isinstance(node, list | tuple):
        return [_place(own, roots, hashes) for own in node]
    if isinstance(node, str):
        return hashes.get(node, next((node.removeprefix(root) for root in roots if node.startswith(root)), node))
    return node


def announce_rows(task: str, rows: list[Row], missing: list[Row]) -> None:
    """Print which explainers of a task are not measured again, and why others are."""
    if not is_first_process():
        return
    found = [row.explainer for row in rows if row not in missing]
    if found:
        print(f"{task}: not measured again: {', '.join(found)}; their files are there (fresh=true measures all)")
    changes = {row.explainer: row.find_change() for row in missing if not row.path.exists()}
    for name, change in changes.items():
        if change:
            print(f"{name} on {task}: measured again, its settings differ: {change}")
