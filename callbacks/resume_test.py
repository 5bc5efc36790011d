"""What a killed evaluation resumes from: the numbers that it has measured."""

import glob
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric

from explainers.evaluation import EvaluationModule
from explainers.report.pictures import Pictures
from explainers.saved.files import atomic, file_name


class ResumeTest(Callback):
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
        if state["key"] != self.key:
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

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not isinstance(pl_module, EvaluationModule):
            return
        metrics = _metrics(pl_module)
        self.state = {
            "key": self.key,
            "batches": pl_module.batches,
            "metrics": {name: _copy(metric.metric_state) for name, metric in metrics.items()},
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
        with atomic(self._path(trainer)) as unfinished:
            torch.save(self.state, unfinished)
        self.saved = time.monotonic()

    @rank_zero_only
    def remove(self) -> None:
        """Delete the files of all processes."""
        for path in self.folder.glob(f"{glob.escape(self.name)}_*_of_*.pt"):
            path.unlink(missing_ok=True)


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """A copy, because the next batch changes the sums and may not end."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in state.items()}


def _metrics(module: LightningModule) -> dict[str, Any]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def _pictures(trainer: Any) -> list[Pictures]:
    return [callback for callback in trainer.callbacks if isinstance(callback, Pictures)]
