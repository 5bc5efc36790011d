"""The checkpoint that an interrupted run resumes from."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from explainers.errors import check_range
from explainers.running.signals import Handler, end_run, write_line

SAVE = 1
"""The decision to save and continue. The other decisions are 0, and the number of the signal that ends the run."""


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What Ctrl-C, torchrun, a closed terminal, SLURM and submitit send to a process that has to end."""


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


class Pending:
    """Keeps the first signal that ends a training, until the training has saved its step and calls `end`.

    A second Ctrl-C ends the process at once. While `at_once` is true, as in a validation, after which nothing exact can
    be saved, the handler that the signal had before the training is called immediately, if it had one: the time may be
    too short for the rest.
    """

    def __init__(self) -> None:
        self.number = 0  # of the signal; 0 for none
        self.at_once = False
        self.earlier: dict[int, Any] = {}

    def start(self) -> None:
        """Handle signals from now on, but for those that are ignored, as nohup ignores SIGHUP."""
        self.number = 0
        heard = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
        self.earlier = {number: signal.signal(number, Handler(self._receive)) for number in heard}

    def stop(self) -> None:
        """Restore the handlers of before."""
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.earlier = {}

    def _receive(self, number: int) -> None:
        if number == self.number == signal.SIGINT:
            os._exit(128 + number)
        if number == signal.SIGINT and not self.number:
            write_line("SIGINT: saving after this step; Ctrl-C again ends at once")
        self.number = self.number or number  # torchrun sends SIGTERM after SIGUSR1 has ended it
        if self.at_once:
            self.call_handler()

    def call_handler(self) -> bool:
        """Call the handler that the signal had before the training; False if that was Python's own or `end_run`."""
        handler = self.earlier.get(self.number)
        if not callable(handler) or handler is signal.default_int_handler or getattr(handler, "act", None) is end_run:
            return False
        number, self.number = self.number, 0
        handler(number, None)
        return True

    def end(self, number: int) -> None:
        """Do what the signal did before the training, which continues if that does not end it."""
        self.number = number
        if not self.call_handler():
            sys.exit(128 + number)
