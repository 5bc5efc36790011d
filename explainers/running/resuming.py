"""What a killed run resumes from: a training from its checkpoint, an evaluation from what it has measured."""

import glob
import io
import pickle
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric

from explainers.errors import InputError
from explainers.evaluation import EvaluationModule
from explainers.report.pictures import Pictures
from explainers.saved.files import atomic, file_name, shared_by_all


def checkpoint_to_resume(ckpt_path: str | None, last: Path) -> Path | None:
    """The checkpoint to resume from: the run's last one by default, or the one that `ckpt_path` names.

    Args:
        ckpt_path: path of a checkpoint, or `last` for the run's last one; `None` for the last one if it exists.
        last: path of the run's last checkpoint.

    Raises:
        InputError: if the named checkpoint does not exist.
    """
    if ckpt_path is None:
        return last if last.exists() else None
    path = last if ckpt_path == "last" else Path(ckpt_path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}: leave ckpt_path out to start a new run, or correct the path")
    return path


def progress_of(checkpoint: Path | None) -> tuple[int, dict[str, float]]:
    """Number of training steps before a checkpoint, and its metrics; 0 and none without a checkpoint.

    Raises:
        InputError: if the file is damaged, or no checkpoint of a run.
    """
    if checkpoint is None:
        return 0, {}
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return int(saved["global_step"]), dict(saved.get("metrics", {}))
    except (RuntimeError, EOFError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{checkpoint}: expected a checkpoint of a run, got a damaged file, or another kind of file: resume from"
            " another checkpoint (ckpt_path=...), or delete it to start the run again"
        ) from error


class WholeCheckpoints(TorchCheckpointIO):
    """Writes each checkpoint wholly or not at all, even if the process is killed.

    Lightning writes it to the folder of temporary files, which is often on another disk, and copies it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint to a local file."""
        content = io.BytesIO()
        torch.save(checkpoint, content)  # to a file, torch would report a full disk as a position in the file
        with atomic(path, alone=True) as unfinished:
            unfinished.write_bytes(content.getbuffer())


class SharedRun(Callback):
    """Checks that the processes of several machines work in one folder and resume from the same checkpoint.

    Args:
        folder: the run's folder.
        step: number of steps before the checkpoint that this process resumes from; 0 for none.

    Raises:
        InputError: before anything is computed, in all processes.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.folder = folder
        self.step = step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.num_nodes == 1:
            return
        strategy: Any = trainer.strategy
        same = strategy.reduce_boolean_decision(strategy.broadcast(self.step) == self.step)
        if not shared_by_all(self.folder, strategy) or not same:
            raise InputError(
                f"expected a folder that all machines share, got {self.folder}, where one machine does not see the"
                " files of another: start the command in a folder of a shared file system, or set hydra.run.dir to one"
            )


class UnfinishedTest(Callback):
    """Saves the sums of all metrics and the pictures of an evaluation, so that a killed one resumes from them.

    Each process writes its own file, with the number of batches that it has measured. The file is read only if the
    settings and the number of processes are the same.

    Args:
        folder: folder of the files.
        task: name of the task.
        key: hash of everything that the numbers depend on.
        seconds: time between two writes of the file.
    """

    def __init__(self, folder: Path, task: str, key: str, seconds: float = 60) -> None:
        self.folder = folder
        self.task = task
        self.key = key
        self.seconds = seconds
        self.name = file_name(task)
        self.saved = time.monotonic()
        self.state: dict[str, Any] = {}
        """The sums after the last whole batch."""

    def _path(self, trainer: Trainer) -> Path:
        return self.folder / f"{self.name}_{trainer.global_rank}_of_{trainer.world_size}.pt"

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume from the file, if there is one of the same settings."""
        if not isinstance(pl_module, EvaluationModule) or not self._path(trainer).exists():
            return
        state = torch.load(self._path(trainer), map_location="cpu", weights_only=True)
        if state["key"] != self.key or state["metrics"].keys() != _metrics(pl_module).keys():  # of another version
            print(
                f"{self.task}: measured from the start: the {state['batches']} batches in {self._path(trainer)} are of"
                " other images or settings"
            )
            return
        for name, metric in _metrics(pl_module).items():
            for part, value in state["metrics"][name].items():
                there = apply_to_collection(value, torch.Tensor, lambda each: each.to(pl_module.device))
                setattr(metric, part, there)  # pictures stay on the CPU
            metric._update_count = state["updates"][name]
        for pictures in _pictures(trainer):
            pictures.rows = state["pictures"]
        pl_module.batches = state["batches"]
        print(f"{self.task}: resumes after {state['batches']} measured batches")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(pl_module, EvaluationModule):
            return
        metrics = _metrics(pl_module)
        self.state = {
            "key": self.key,
            "batches": pl_module.batches,
            "metrics": {name: _copied(metric.metric_state) for name, metric in metrics.items()},
            "updates": {name: metric._update_count for name, metric in metrics.items()},
            "pictures": next((pictures.rows for pictures in _pictures(trainer)), {}),
        }
        if time.monotonic() - self.saved >= self.seconds:
            self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save all whole batches when a signal ends the test."""
        if self.state and isinstance(exception, KeyboardInterrupt | SystemExit):
            self._save(trainer)
            print(f"{self.task}: saved {self.state['batches']} of {sum(trainer.num_test_batches)} measured batches")

    def _save(self, trainer: Trainer) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic(self._path(trainer)) as unfinished:
            torch.save(self.state, unfinished)
        self.saved = time.monotonic()

    @rank_zero_only
    def remove(self) -> None:
        """Delete the files of all processes."""
        for path in self.folder.glob(f"{glob.escape(self.name)}_*_of_*.pt"):
            path.unlink(missing_ok=True)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy, because the next batch changes the sums and may not end."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in state.items()}


def _metrics(module: LightningModule) -> dict[str, Any]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def _pictures(trainer: Any) -> list[Pictures]:
    return [callback for callback in trainer.callbacks if isinstance(callback, Pictures)]
