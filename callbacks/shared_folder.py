"""Whether the machines of a run share its folder."""

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from explainers.errors import InputError
from explainers.saved.files import is_shared


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
            raise InputError(f"expected a folder that all machines share, got {self.folder}: set hydra.run.dir to one")
