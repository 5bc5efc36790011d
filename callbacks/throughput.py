"""Speed and memory use of a training run."""

import time
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from explainers.errors import check_range


class Throughput(Callback):
    """Logs training images per second and peak GPU memory in GiB, once per epoch.

    The speed is the sum over all processes; the memory is measured in this process. The first `warmup` steps of each
    epoch and the validation are not timed, so compilation, cold caches and the start of the loaders do not count.

    Args:
        warmup: steps of each epoch that are not timed, at least 1.
    """

    def __init__(self, warmup: int = 2) -> None:
        check_range(1, warmup=warmup)
        self.warmup = warmup
        self.steps = 0
        self.images = 0
        self.start = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        if self.steps == 1 and pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.steps == self.warmup:
            self.start = _read_clock(pl_module)
        if self.steps > self.warmup:
            self.images += len(batch["index"])
        if batch_idx + 1 < trainer.num_training_batches:
            return
        if self.images:
            speed = self.images * trainer.world_size / (_read_clock(pl_module) - self.start)
            pl_module.log("throughput/images_per_second", speed)
            if pl_module.device.type == "cuda":
                pl_module.log("throughput/peak_memory_gib", torch.cuda.max_memory_allocated(pl_module.device) / 2**30)
        self.steps = 0  # here, because a resumed epoch begins in the middle, without on_train_epoch_start
        self.images = 0


def _read_clock(module: LightningModule) -> float:
    """Time in seconds, after all work of the module's device is done."""
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()
