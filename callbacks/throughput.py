"""How fast a run is, and how much memory it takes."""

import time
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Logs training images per second of all processes together, and the peak GPU memory of one, in GiB, once an epoch.

    The clock starts after `warmup` steps of each epoch, with the device synchronised: compilation, caches and the
    filling of loaders do not count, validation neither.
    """

    def __init__(self, warmup: int = 2) -> None:
        self.warmup = warmup
        self.images, self.start = 0, 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.images = 0
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.warmup:
            self.start = _now(pl_module)
        if batch_idx >= self.warmup:
            self.images += len(batch["index"])
        if self.images and batch_idx + 1 == trainer.num_training_batches:
            speed = self.images * trainer.world_size / (_now(pl_module) - self.start)
            pl_module.log("throughput/images_per_second", speed)
            if pl_module.device.type == "cuda":
                pl_module.log("throughput/peak_memory_gib", torch.cuda.max_memory_allocated(pl_module.device) / 2**30)


def _now(module: LightningModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()
