"""One progress bar for a whole training or test."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from tqdm import tqdm


class Progress(Callback):
    """Shows one bar over all steps of a training, with its latest validation metric, or over the batches of a test.

    It disappears at the end. Where the output is no terminal, such as the log of a job, nothing is shown.

    Args:
        name: what stands before the bar.
        metric: the logged metric that stands behind it; `None` for none.
    """

    def __init__(self, name: str, metric: str | None = None) -> None:
        self.name, self.metric = name, metric
        self.bar: tqdm | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, int(trainer.estimated_stepping_batches), trainer.global_step, "step")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._advance(trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.metric or "")
        if self.bar is not None and value is not None:
            self.bar.set_postfix({self.metric: f"{value.item():.3g}"})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, int(sum(trainer.num_test_batches)), 0, "batch")

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._advance(batch_idx + 1)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _open(self, trainer: Trainer, total: int, initial: int, unit: str) -> None:
        hidden = None if trainer.is_global_zero else True  # None: hidden where the output is no terminal
        self.bar = tqdm(desc=self.name, total=total, initial=initial, unit=unit, leave=False, disable=hidden)

    def _advance(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None
