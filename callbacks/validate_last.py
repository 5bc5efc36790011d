"""A validation after the last step of a training."""

from typing import Any

from lightning import Callback, LightningModule


class ValidateLast(Callback):
    """Validates after the last step, where `trainer.max_steps` ends a training inside an epoch: Lightning would not."""

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == trainer.max_steps and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            trainer.val_check_batch = batch_idx + 1
