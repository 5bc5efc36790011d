"""The progress of a training or a test."""

from contextlib import ExitStack
from typing import Any

from lightning import Callback, LightningModule, Trainer
from tqdm import tqdm

from explainers.runtime.progress import progress


class Progress(Callback):
    """Shows one bar over all steps of a training, with its latest validation metric, or over all batches of a test.

    Without a terminal, as in the log of a job, it prints a line every half minute instead. Lightning's bars start anew
    in each epoch and print no lines. A batch of a test may take many minutes: the forward passes of the target count as
    fractions of it.

    Args:
        name: text before the bar.
        metric: the logged metric behind the bar; `None` for none.
    """

    def __init__(self, name: str, metric: str | None = None) -> None:
        self.name = name
        self.metric = metric
        self.bar: tqdm | None = None
        self.hooks = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, int(trainer.estimated_stepping_batches), trainer.global_step, "step")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._advance(trainer.global_step)

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.update(0)  # prints a line if one is due

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.metric or "")
        if self.bar is not None and value is not None:
            self.bar.set_postfix({str(self.metric): f"{value.item():.3g}"})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, int(sum(trainer.num_test_batches)), 0.0, "batch")
        passes = sum(getattr(pl_module, "forward_passes", {}).values())
        backbone = getattr(getattr(pl_module, "target", None), "backbone", None)
        if not passes or backbone is None:
            return
        leaves = (part for part in backbone.modules() if not [*part.children()])
        first = backbone.blocks[0] if hasattr(backbone, "blocks") else next(leaves)
        size = trainer.datamodule.eval_batch_size  # type: ignore[attr-defined]
        hook = first.register_forward_pre_hook(lambda _, given: self._passed(len(given[0]) / (passes * size)))
        self.hooks.callback(hook.remove)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._advance(batch_idx + 1)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _open(self, trainer: Trainer, total: int, initial: float, unit: str) -> None:
        self.bar = progress(self.name, total, unit, initial, trainer.is_global_zero)

    def _passed(self, share: float) -> None:
        """Count a share of a batch, but never the whole: fewer forward passes than announced may be needed."""
        if self.bar is not None:
            self.bar.update(min(share, max(0.0, int(self.bar.n + 1e-6) + 0.99 - self.bar.n)))

    def _advance(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def _close(self) -> None:
        self.hooks.close()
        if self.bar is not None:
            self.bar.close()
        self.bar = None
