"""The record of a run in its folder: config, versions and hashes of weight files, which a resumed run must share."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.running.processes import count_all_processes
from explainers.running.settings import MODELS
from explainers.saved.files import file_hashes, is_first_process, write_atomically
from explainers.saved.records import devices, leaves, versions

CHECKPOINTS, METRICS = "checkpoints", "metrics.json"
"""What a training leaves in its folder; one that trains nothing, such as an explainability vector, only the second."""

MAY_DIFFER = (
    *("data_dir", "ckpt_path", "fit", "export", "test", "next", "logger"),
    *(f"callbacks.{name}" for name in ("progress", "throughput", "learning_rate", "heatmaps", "check")),
    *(f"trainer.{name}" for name in ("max_steps", "max_epochs", "accelerator", "log_every_n_steps", "profiler")),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "data.num_workers"),
)
"""Config keys that may differ between a run and the command that resumes it: they do not change what is learned."""

DIVISION = (
    *(f"trainer.{name}" for name in ("devices", "num_nodes", "strategy", "accumulate_grad_batches")),
    "data.batch_size",
)
"""Config keys that divide the images of a step among machines, processes and batches."""


def find_checkpoint(ckpt_path: str | None, last: Path) -> Path | None:
    """The checkpoint to resume from.

    Args:
        ckpt_path: path of a checkpoint, or `last` for the run's last one; `None` for the last one if it exists.
        last: path of the run's last checkpoint.
    """
    if ckpt_path is None:
        return last if last.exists() else None
    path = last if ckpt_path == "last" else Path(ckpt_path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}: leave ckpt_path out to start a new run, or correct the path")
    return path


def start_record(cfg: DictConfig, folder: Path, may_differ: bool) -> None:
    """Write config, versions, command and hashes of weight files into the folder of a run that starts or resumes.

    A `fast_dev_run` is only checked: it leaves no files.

    Args:
        cfg: the config of the run.
        folder: the run's folder.
        may_differ: resume the run of this folder even if its config or its files of weights were different.

    Raises:
        InputError: if the folder holds a run with another config or other weights.
    """
    if not is_first_process():
        return
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    if config.get("explainer") and "explainer" in (config.get("module") or ()):
        del config["module"]["explainer"]  # written once
    record: dict[str, Any] = {
        "command": sys.argv,
        "python": sys.version.split()[0],
        "packages": versions(),
        "devices": devices(),
        "images_per_step": count_images_per_step(config, count_all_processes(cfg.trainer)),
        "files": hash_model_files(config, folder),
    }
    left = [name for name in (CHECKPOINTS, METRICS) if (folder / name).exists()]  # nothing by a run that only failed
    if (folder / "config.yaml").exists() and left and not may_differ:
        check_same_run(folder, config, record)
    if not cfg.trainer.fast_dev_run:
        write_atomically(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
        write_atomically(folder / "versions.json", json.dumps(record, indent=2))


def check_same_run(folder: Path, config: dict[str, Any], record: Mapping[str, Any]) -> None:
    """Raise an InputError if the run in a folder has another config, or other files of weights.

    Images of a step may be divided otherwise among machines, processes and batches.

    Args:
        folder: the run's folder.
        config: resolved config of the command that resumes the run.
        record: its record.
    """
    earlier = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    before = read_json(folder / "versions.json")
    images, earlier_images = record["images_per_step"], before.get("images_per_step")
    free = MAY_DIFFER + DIVISION * (images is not None and images == earlier_images)
    both: list[Any] = [earlier, config]
    old, new = (dict(leaves(leave_out(each, free))) for each in both)
    differences = [f"{key}: {old.get(key)} → {new.get(key)}" for key in new | old if old.get(key) != new.get(key)]
    for key, file in record["files"].items():
        known, now = before.get("files", {}).get(key, file)["sha256"], file["sha256"]
        if known != now:
            differences.append(f"{key}: {file['path']} (SHA-256 {known[:12]} → {now[:12]})")
    if differences:
        raise InputError(
            f"{folder} holds a run of another config: {differences[0]}: give this run its own name (name=...), delete"
            " the folder, or resume its checkpoint anyway (ckpt_path=last)"
        )


def leave_out(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """A config without some of its dotted keys.

    >>> leave_out({"seed": 0, "trainer": {"devices": 2, "precision": "32-true"}}, ["seed", "trainer.devices"])
    {'trainer': {'precision': '32-true'}}
    """
    below: dict[str, list[str]] = {}
    for first, _, rest in (key.partition(".") for key in keys):
        below.setdefault(first, []).append(rest)
    kept = {name: value for name, value in config.items() if "" not in below.get(name, ())}
    return {
        name: leave_out(value, below[name]) if name in below and isinstance(value, dict) else value
        for name, value in kept.items()
    }


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that a run has written to its folder; empty if there is none."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise InputError(f"{path}: expected JSON of a run, got a damaged file ({error}): delete it") from error
    return content


def write_metrics(path: Path, metrics: Mapping[str, float], objective: str) -> None:
    """Write the metrics of a run to a JSON file, which has no NaN: a metric without a finite number is left out.

    Raises:
        InputError: if the objective is such a metric.
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    write_atomically(path, json.dumps(finite, indent=2))
    if objective in metrics.keys() - finite.keys():
        raise InputError(
            f"objective={objective}: expected a finite number, got {metrics[objective]}: choose another objective, or"
            " train with a lower learning rate"
        )


def count_images_per_step(config: Mapping[str, Any], processes: int) -> int | None:
    """Images of one step of the optimiser, of all processes together; `None` if the config has no batch size.

    >>> count_images_per_step({"data": {"batch_size": 8}, "trainer": {"accumulate_grad_batches": 3}}, processes=8)
    192
    """
    size = (config.get("data") or {}).get("batch_size")
    return size and size * processes * (config.get("trainer") or {}).get("accumulate_grad_batches", 1)


def hash_model_files(config: Mapping[str, Any], folder: Path) -> dict[str, dict[str, str]]:
    """Dotted config key → `path` and `sha256` of every file that a model of the config is read from.

    Those in the `folder` of the run are left out, because the run changes them.

    >>> config = {"explainer": {"weights": __file__, "hops": [1]}, "data": {"root": __file__}}
    >>> files = hash_model_files(config, Path("runs/tve"))
    >>> list(files), Path(files["explainer.weights"]["path"]).name
    (['explainer.weights'], 'record.py')
    """
    paths = {
        key: value
        for key, value in leaves({name: config.get(name) for name in MODELS})
        if isinstance(value, str) and os.path.isfile(value)
        if not Path(value).resolve().is_relative_to(folder.resolve())
    }
    hashes = file_hashes(list(paths.values()))
    return {key: {"path": path, "sha256": value} for (key, path), value in zip(paths.items(), hashes, strict=True)}
