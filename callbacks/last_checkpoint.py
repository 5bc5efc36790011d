"""The checkpoint that an interrupted run goes on from."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from explainers.errors import InputError
from explainers.running.processes import end_run, say

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What Ctrl-C, torchrun, SLURM and submitit send to a process that has to end."""

SAVE = 1
"""A decision to save and go on. The other decisions are 0, and the number of the signal that ends the run."""


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt` at the end of every epoch, every few minutes inside it, and when the run is told to end.

    A run that is told to end by a signal finishes its step, in all processes, and writes the checkpoint. Then the
    handler that the signal had before the training is called; without one, the process ends, at once after a second
    Ctrl-C. During a validation, no exact checkpoint can be written: a handler is called at once, because the time may
    be too short for the rest, and without one, the process ends after the validation.

    Args:
        folder: folder of the checkpoint.
        minutes: time between two checkpoints inside an epoch.
    """

    def __init__(self, folder: str, minutes: float = 10) -> None:
        if minutes < 0:
            raise InputError(f"expected minutes between two checkpoints of at least 0, got {minutes}")
        self.path = Path(folder) / "last.ckpt"
        self.seconds = 60 * minutes
        self.saved = 0.0
        self.received = 0
        self.process = os.getpid()
        self.validating = False
        self.handlers: dict[int, Any] = {}
        self.loaders: list[dict[str, int]] = []

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the state of the loader: Lightning drops it if a schedule has asked for the number of steps before."""
        self.loaders = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for state in self.loaders:
            _go_on_after(trainer, state)
        self.saved, self.received = time.monotonic(), 0
        self.handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self.process:
            return  # a loader process, which has inherited the handler
        if number == self.received == signal.SIGINT:
            os._exit(128 + number)
        if number == signal.SIGINT and not self.received:
            say("SIGINT: saves after this step; Ctrl-C again ends at once")
        self.received = self.received or number  # torchrun sends SIGTERM when SIGUSR1 has ended it
        if self.validating:
            self._answer()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validating = True
        self._answer()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validating = False

    def _answer(self) -> bool:
        """Call the handler that the received signal had before the training; False if it had none."""
        handler = self.handlers.get(self.received)
        if not callable(handler) or handler is signal.default_int_handler or getattr(handler, "func", None) is end_run:
            return False
        number, self.received = self.received, 0
        handler(number, None)
        return True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # After the last batch, a checkpoint would leave out the validation. Between two steps, gradients are not saved
        last = batch_idx + 1 == trainer.num_training_batches
        if not last and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            due = trainer.is_global_zero and time.monotonic() - self.saved >= self.seconds
            self._act(trainer, self._decision(trainer, self.received or due * SAVE))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._act(trainer, max(SAVE, self._decision(trainer, self.received)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_handlers()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _decision(self, trainer: Trainer, own: int) -> int:
        """The largest decision of all processes: one that stops alone would leave the others waiting without end."""
        decision = torch.tensor(own, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(decision, reduce_op="max"))  # type: ignore[arg-type]

    def _act(self, trainer: Any, decision: int) -> None:
        if not decision or trainer.fast_dev_run:
            return
        trainer.save_checkpoint(self.path)
        self.saved = time.monotonic()
        for logger in trainer.loggers:
            logger.save()  # a run that goes on from this checkpoint keeps the metrics before it
        if decision != SAVE:
            self._end(trainer, signal.Signals(self.received or decision))

    def _end(self, trainer: Trainer, number: signal.Signals) -> None:
        """Do what the signal did before the training."""
        if trainer.is_global_zero:
            print(f"{number.name}: saved step {trainer.global_step}, from which the same command goes on")
        self.received = number
        if not self._answer() and self.handlers[number] != signal.SIG_IGN:
            sys.exit(128 + number)
        self.received = 0

    def _restore_handlers(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}


def _go_on_after(trainer: Any, state: dict[str, int]) -> None:
    """Go on after the images that a loader has delivered, maybe in batches of another size.

    Lightning counts batches, whose size changes with the number of processes; in a step are as many images as before.
    """
    loader, loop = trainer.train_dataloader, trainer.fit_loop
    if state["epoch"] < loop.epoch_progress.current.processed:
        return  # a checkpoint of the end of an epoch
    loader.load_state_dict(state)
    progress = loop.epoch_loop.batch_progress
    added = loader.batches - progress.current.ready
    for counts in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + added)
