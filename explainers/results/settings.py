"""The settings that the numbers of a task depend on."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from explainers.errors import check_distinct
from explainers.posthoc.names import labelled
from explainers.saved.files import file_hashes
from explainers.saved.identity import WITHOUT_EFFECT
from explainers.saved.records import leaves

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


def settings_of(
    task: str, config: Mapping[str, Any], hashes: Mapping[str, str], data: Mapping[str, Any], processes: int = 1
) -> dict[str, Any]:
    """The settings that all numbers of a task depend on, for every explainer.

    They are the resolved config without the explainers and the keys in `NOT_MEASURED`. Paths of files are replaced by
    hashes, and the data set by its fingerprint. The settings of the reference explainer are added, and the number of
    processes if the trainer limits the batches of each process.

    >>> config = {"name": "run", "data_dir": "/disk", "target": {"head": "a/head.safetensors"}, "seed": 0}
    >>> config["tasks"] = {"pets": {"data": {"root": "/disk/pets", "batch_size": 8}, "target": None}, "cars": {}}
    >>> settings_of("pets", config, hashes={"a/head.safetensors": "5d41"}, data={"images": 12})
    {'target': {'head': '5d41'}, 'seed': 0, 'task': {'target': None}, 'data': {'images': 12, 'batch_size': 8}}

    Args:
        task: name of the task.
        config: resolved config, in nested dicts.
        hashes: path → SHA-256 of the files that the config names, see `hash_files`.
        data: fingerprint of the task's data set.
        processes: number of processes that measure.
    """
    shared = {key: value for key, value in config.items() if key not in EXPLAINERS}
    own = {key: value for key, value in config["tasks"][task].items() if key not in EXPLAINERS}
    loader = own.pop("data", None) or {}
    batches = {key: loader[key] for key in BATCHES if key in loader}
    reference = (config.get("evaluation") or {}).get("reference")
    compared = {"reference": explainers_of(task, config, hashes).get(reference)} if reference else {}
    settings = {"task": _reduced(own, config, hashes, "task"), "data": {**data, **batches}}
    divided = {"processes": processes} if _limits_batches(config.get("trainer") or {}) else {}
    return {**_reduced(shared, config, hashes), **settings, **compared, **divided}


def _limits_batches(trainer: Mapping[str, Any]) -> bool:
    """Whether each process tests a part of its batches; a limit of 1.0 is all of them, 1 is a single batch."""
    limit = trainer.get("limit_test_batches")
    return bool(trainer.get("fast_dev_run")) or limit is not None and not (isinstance(limit, float) and limit == 1)


def explainers_of(task: str, config: Mapping[str, Any], hashes: Mapping[str, str]) -> dict[str, Any]:
    """Settings of each explainer of a task, learned ones and methods, in their order; see `settings_of`.

    >>> config = {"explainers": {"tve": {"hops": [1]}}, "methods": [{"RISE": {"masks": 8}}], "tasks": {"pets": {}}}
    >>> explainers_of("pets", config, {})
    {'tve': {'hops': [1]}, 'RISE(masks=8)': {'RISE': {'masks': 8}}}
    """
    own = config["tasks"][task].get("explainers") or {}
    nodes = {name: [node, own.get(name)] if own.get(name) else node for name, node in config["explainers"].items()}
    nodes |= {name: [None, node] for name, node in own.items() if name not in nodes}
    methods = {label: {name: options} for label, (name, options) in labelled(config.get("methods") or ()).items()}
    check_distinct(**{"explainers and methods": [*nodes, *methods]})
    return {name: _reduced(node, config, hashes, f"explainers.{name}") for name, node in (nodes | methods).items()}


def row_keys(settings: Mapping[str, Any]) -> dict[str, str]:
    """Explainer → hash of the settings that its numbers and heatmaps depend on.

    Args:
        settings: entry of a task in results.json: settings `shared` by all rows, and of each of the `explainers`.
    """
    shared = settings.get("shared")
    texts = {name: json.dumps([shared, own], sort_keys=True) for name, own in settings.get("explainers", {}).items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def _reduced(node: Any, config: Mapping[str, Any], hashes: Mapping[str, str], path: str = "") -> Any:
    """A part of the config without keys that change no number; paths of files are replaced by hashes."""
    if isinstance(node, Mapping):
        within = {name: f"{path}.{name}".lstrip(".") for name in node}
        kept = [name for name in node if name not in WITHOUT_EFFECT and within[name] not in NOT_MEASURED]
        return {name: _reduced(node[name], config, hashes, within[name]) for name in kept}
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [_reduced(item, config, hashes, path) for item in node]
    if isinstance(node, str):
        roots = tuple(f"{config[key].rstrip('/')}/" for key in ("data_dir", "cache_dir") if config.get(key))
        return hashes.get(node, next((node.removeprefix(root) for root in roots if node.startswith(root)), node))
    return node


def hash_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Path → SHA-256 of every file in the config that numbers depend on."""
    # Data sets are left out: their own fingerprints count
    placed = {**config, "data_dir": None, "cache_dir": None}
    parts = [(settings_of(task, placed, {}, {}), explainers_of(task, placed, {})) for task in config["tasks"]]
    settings = [part for both in parts for part in both]
    paths = sorted({text for _, text in leaves(settings) if isinstance(text, str) and os.path.isfile(text)})
    return dict(zip(paths, file_hashes(paths), strict=True))
