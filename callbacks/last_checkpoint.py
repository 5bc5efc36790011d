"""The checkpoint that an interrupted run resumes from."""

import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from explainers.errors import check_range
from explainers.running.signals import Pending

SAVE = 1
"""The decision to save and continue. The other decisions are 0, and the number of the signal that ends the run."""


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt` at the end of every epoch, every few minutes inside it, and when a signal ends the run.

    On a signal, all processes finish their step and the checkpoint is written; then `Pending` says what happens. During
    a validation, no exact checkpoint can be written: without a handler of its own, the process ends after it.

    Args:
        folder: folder of the checkpoint.
        minutes: time between two checkpoints inside an epoch.
    """

    def __init__(self, folder: str, minutes: float = 10) -> None:
        check_range(0, minutes=minutes)
        self.last_model_path = str(Path(folder) / "last.ckpt")  # named as in Lightning's ModelCheckpoint
        self.seconds = 60 * minutes
        self.saved = 0.0
        self.signal = Pending()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Skip the images that were delivered before a checkpoint inside an epoch, maybe in batches of another size.

        Lightning counts batches, whose size changes with the number of processes; a step has as many images as before.
        """
        loop = checkpoint["loops"]["fit_loop"]
        trainer.fit_loop.setup_data()
        loader: Any = trainer.train_dataloader
        for state in loop["state_dict"].get("combined_loader", []):
            if state["epoch"] < loop["epoch_progress"]["current"]["processed"]:
                continue  # a checkpoint of the end of an epoch
            loader.load_state_dict(state)
            progress = loop["epoch_loop.batch_progress"]
            added = loader.batches - progress["current"]["ready"]
            for counts in (progress["current"], progress["total"]):
                counts.update({name: count + added for name, count in counts.items()})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved = time.monotonic()
        self.signal.start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signal.at_once = True
        self.signal.call_handler()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signal.at_once = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # After the last batch, a checkpoint would skip the validation. Between two steps, gradients would be lost
        last = batch_idx + 1 == trainer.num_training_batches
        if not last and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            due = trainer.is_global_zero and time.monotonic() - self.saved >= self.seconds
            self._act(trainer, self._agree(trainer, self.signal.number or due * SAVE))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._act(trainer, max(SAVE, self._agree(trainer, self.signal.number)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signal.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.signal.stop()

    def _agree(self, trainer: Trainer, own: int) -> int:
        """The largest decision of all processes: one that stops alone would leave the others waiting without end."""
        decision = torch.tensor(own, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(decision, reduce_op="max"))  # type: ignore[arg-type]

    def _act(self, trainer: Any, decision: int) -> None:
        if not decision or trainer.fast_dev_run:
            return
        trainer.save_checkpoint(self.last_model_path)
        self.saved = time.monotonic()
        for logger in trainer.loggers:
            logger.save()  # a run that resumes from this checkpoint keeps the metrics before it
        if decision != SAVE:
            number = signal.Signals(self.signal.number or decision)
            if trainer.is_global_zero:
                print(f"{number.name}: saved step {trainer.global_step}, from which the same command resumes")
            self.signal.end(number)
