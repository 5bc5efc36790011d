"""What a resumed run goes on with: its checkpoint, and the files that its folder and its models were read from."""

import io
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError, safe_open

from explainers.errors import InputError
from explainers.saved.files import atomic, file_hashes, shared_by_all
from explainers.saved.records import leaves

MODELS = ("target", "explainer", "module")
"""Config keys of models. Files of data are not hashed, because they may have many gigabytes."""

DIVISION = {"trainer": ("devices", "num_nodes", "strategy", "accumulate_grad_batches"), "data": ("batch_size",)}
"""Config keys that divide the images of a step among machines, processes and batches."""


class WholeCheckpoints(TorchCheckpointIO):
    """Writes checkpoints that are whole, whenever the process is killed.

    Lightning writes them to the folder of temporary files first, which is often on another disk, and copies them.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint to a local file."""
        content = io.BytesIO()
        torch.save(checkpoint, content)  # to a file, torch would report a full disk as a position in the file
        with atomic(path, alone=True) as unfinished:
            unfinished.write_bytes(content.getbuffer())


class SharedRun(Callback):
    """Checks that the processes of several machines work in one folder and go on from the same checkpoint.

    Args:
        folder: the run's folder.
        step: number of steps before the checkpoint that this process has found; 0 for none.

    Raises:
        InputError: before anything is computed, in all processes.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.folder, self.step = folder, step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.num_nodes == 1:
            return
        strategy: Any = trainer.strategy
        same = strategy.reduce_boolean_decision(strategy.broadcast(self.step) == self.step)
        if not shared_by_all(self.folder, strategy) or not same:
            raise InputError(
                f"expected a folder that all machines share, got {self.folder}, where one does not see the files of"
                " another; start the command in a folder of a shared file system, or set hydra.run.dir to one"
            )


def checkpoint_to_resume(asked: str | None, last: Path) -> Path | None:
    """The checkpoint to go on from: the run's last one by default, or the one that was asked for.

    Args:
        asked: path of a checkpoint; `last` for the run's last one, or `None` for that one if there is one.
        last: path of the run's last checkpoint.

    Raises:
        InputError: if the one that was asked for is not there.
    """
    if asked is None:
        return last if last.exists() else None
    path = last if asked == "last" else Path(asked)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}: leave ckpt_path out to start a new run, or correct the path")
    return path


def progress_of(checkpoint: Path | None) -> tuple[int, dict[str, float]]:
    """Number of training steps before a checkpoint, and the metrics at its time; 0 and none if there is no checkpoint.

    Raises:
        InputError: if the file is not a whole checkpoint of a run.
    """
    if checkpoint is None:
        return 0, {}
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return int(saved["global_step"]), dict(saved.get("metrics", {}))
    except (RuntimeError, EOFError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{checkpoint}: expected a checkpoint of a run, got a damaged file, or something else: go on from another"
            " checkpoint (ckpt_path=...), or delete it to start the run again"
        ) from error


def images_per_step(config: Mapping[str, Any], processes: int) -> int | None:
    """Images of one step of the optimiser, of all processes together; `None` if the config has no batch size.

    >>> images_per_step({"data": {"batch_size": 8}, "trainer": {"num_nodes": 2, "accumulate_grad_batches": 3}}, 4)
    192

    Args:
        config: resolved config, in nested dicts and lists.
        processes: number of processes of each machine.
    """
    size, trainer = (config.get("data") or {}).get("batch_size"), config.get("trainer") or {}
    return size and size * processes * trainer.get("num_nodes", 1) * trainer.get("accumulate_grad_batches", 1)


def divided_as(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The config `now`, whose steps are divided as those of `earlier`."""
    taken = {group: {key: (earlier.get(group) or {}).get(key) for key in keys} for group, keys in DIVISION.items()}
    return dict(now) | {group: now[group] | keys for group, keys in taken.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that a run has written to its folder; empty if there is none.

    Raises:
        InputError: if the file is damaged.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected what a run has written there, got a damaged file: delete it to go on")
    return content


def check_model_files(config: Any) -> None:
    """Raise an InputError for a file of weights that is missing or damaged, because timm does not name it.

    Args:
        config: resolved config, in nested dicts and lists.
    """
    for key, path in leaves(config):
        if key.endswith("checkpoint_path") and path and not os.path.isfile(path):
            raise InputError(f"no model at {path}: train it first with train.py, or correct checkpoint_path")
        if isinstance(path, str) and path.endswith(".safetensors") and os.path.isfile(path):
            try:
                with safe_open(path, "pt"):
                    pass
            except SafetensorError as error:
                raise InputError(f"{path}: expected weights, got a damaged file: write or fetch it again") from error


def model_files(config: Mapping[str, Any], folder: Path) -> dict[str, dict[str, str]]:
    """Dotted config key → `path` and `sha256` of every file that a model of the config is read from.

    >>> config = {"explainer": {"weights": __file__, "hops": [1]}, "data": {"root": __file__}}
    >>> files = model_files(config, Path("runs/tve"))
    >>> list(files), Path(files["explainer.weights"]["path"]).name
    (['explainer.weights'], 'resuming.py')

    Args:
        config: resolved config, in nested dicts and lists.
        folder: the run's folder, whose own files are left out, because the run changes them.
    """
    own = folder.resolve()

    def read_by_a_model(node: Any) -> bool:
        return isinstance(node, str) and os.path.isfile(node) and not Path(node).resolve().is_relative_to(own)

    models = {name: config.get(name) for name in MODELS}
    found = {key: path for key, path in leaves(models) if read_by_a_model(path)}
    hashes = file_hashes(list(found.values()))
    return {key: {"path": path, "sha256": value} for (key, path), value in zip(found.items(), hashes, strict=True)}


def replaced_file(earlier: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> str | None:
    """Describe the first file with other contents as `key: path (hash → hash)`; None if there is none.

    Args:
        earlier: `model_files` of the run when it began.
        now: `model_files` of the run when it goes on.
    """
    for key, file in now.items():
        before, after = earlier.get(key, file)["sha256"], file["sha256"]
        if before != after:
            return f"{key}: {file['path']} (SHA-256 {before[:12]} → {after[:12]})"
    return None
