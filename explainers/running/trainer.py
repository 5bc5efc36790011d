"""Lightning's trainer of a run: its device, precision and callbacks, and the checkpoint that it resumes from."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import DictConfig

from explainers.errors import InputError
from explainers.saved.files import atomic, is_shared


def build_all(group: DictConfig | None) -> list[Any]:
    """Instantiate every object of a config group, such as `callbacks`; entries that are null are skipped.

    >>> from omegaconf import OmegaConf
    >>> build_all(OmegaConf.create({"first": {"_target_": "builtins.dict", "size": 3}, "second": None}))
    [{'size': 3}]
    """
    return [instantiate(node) for node in (group or {}).values() if node is not None]


def build_trainer(settings: DictConfig, **parts: Any) -> Trainer:
    """Build the trainer of the settings with callbacks, loggers and plugins that leaves signals to `signals.py`.

    Lightning's handler of SIGTERM starts a broadcast at any moment of a step, so that processes may wait for each other
    for ever; its handler of SIGUSR1 writes a checkpoint in the middle of a step. It has no public setting for them.
    """
    on_mac = settings.accelerator == "auto" and torch.backends.mps.is_available()  # whose GPU has no float64
    trainer: Trainer = instantiate(settings, accelerator="cpu" if on_mac else settings.accelerator, **parts)
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def read_progress(checkpoint: Path | None) -> tuple[int, int, dict[str, float]]:
    """Number of steps and of epochs that began before a checkpoint, and its metrics; 0, 0 and none without one."""
    if checkpoint is None:
        return 0, 0, {}
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        epochs = saved["loops"]["fit_loop"]["epoch_progress"]["current"]["started"]
        return int(saved["global_step"]), int(epochs), dict(saved.get("metrics", {}))
    except (RuntimeError, EOFError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{checkpoint}: expected a checkpoint of a run, got a damaged file, or another kind of file: resume from"
            " another checkpoint (ckpt_path=...), or delete it to start the run again"
        ) from error


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint wholly or not at all, even if the process is killed.

    Lightning writes it to the folder of temporary files, which is often on another disk, and copies it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)  # to a file, torch would report a full disk as a position in the file
        with atomic(path, alone=True) as unfinished:
            unfinished.write_bytes(content.getbuffer())


class CheckSharedFolder(Callback):
    """Raises an InputError unless the processes of several machines share one folder and resume from one checkpoint.

    Args:
        folder: the run's folder.
        step: number of steps before the checkpoint that this process resumes from; 0 for none.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.folder = folder
        self.step = step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.num_nodes == 1:
            return
        strategy: Any = trainer.strategy
        same = strategy.reduce_boolean_decision(strategy.broadcast(self.step) == self.step)
        if not is_shared(self.folder, strategy) or not same:
            raise InputError(
                f"expected a folder that all machines share, got {self.folder}, where one machine does not see the"
                " files of another: start the command in a folder of a shared file system, or set hydra.run.dir to one"
            )
