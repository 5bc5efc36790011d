"""A copy of the target that is at home with masked images (Jethani et al., 2021; Covert et al., 2022)."""

from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric

from explainers.augmentation import random_resized_crop
from explainers.exchange import copy_target, save_target, with_part, without_part
from explainers.masking import PatchGrid, mask_pixels
from explainers.optimisation import OptimizerBuilder, SchedulerBuilder, configure
from explainers.sampling import random_coalitions, stream
from explainers.target import TargetModel


class Surrogate(LightningModule):
    """Tunes the target to say of an image with removed patches what it said of the whole image.

    Minimises KL(f(x) ‖ f_s(x_S)): f is the target as it was, f_s is tuned, and S has a size uniform in 0 ... N. Then
    f_s(x_S) is the expectation of f given the visible patches, instead of the answer to an image that f never met.

    Args:
        target: tuned in place; a frozen copy of it teaches.
        min_crop: area of the smallest random crop of a training image; `None` trains on the images as they are.
        seed: of the coalitions and the crops.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        optimizer: OptimizerBuilder,
        scheduler: SchedulerBuilder | None = None,
        min_crop: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.teacher = copy_target(target).requires_grad_(False)
        self.target, self.grid, self.min_crop, self.seed = target.requires_grad_(True), grid, min_crop, seed
        self.optimizer, self.scheduler = optimizer, scheduler
        self.val_loss = MeanMetric()
        self.train()  # the trainer keeps every module in the mode it finds it in

    def train(self, mode: bool = True) -> "Surrogate":
        super().train(mode)
        self.teacher.eval()
        return self

    @property
    def sources(self) -> tuple[()]:
        raise ValueError("a surrogate sees every image under new masks in every epoch: take a datamodule of images")

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) → logits (B, K)."""
        return self.target(images)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.min_crop is not None:
            seed = stream("crops", self.seed, self.current_epoch)
            batch = batch | {"image": random_resized_crop(batch["image"], batch["index"], seed, self.min_crop)}
        loss = self._loss(batch, self.current_epoch)
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.val_loss.update(self._loss(batch), len(batch["index"]))
        self.log("val/loss", self.val_loss, prog_bar=True)

    def _loss(self, batch: dict[str, Tensor], epoch: int = 0) -> Tensor:
        """KL(f(x) ‖ f_s(x_S)), with one coalition S of each image."""
        images, seed = batch["image"], stream("coalitions", self.seed, epoch)
        keep = random_coalitions(batch["index"], self.grid.num_patches, 1, seed)[:, 0]  # (B, N)
        with torch.no_grad():
            taught = self.teacher(images).log_softmax(-1)
        masked = mask_pixels(self.target.normalise(images), keep, self.grid)
        said = self.target.classify(self.target.embed(masked)).log_softmax(-1)
        return F.kl_div(said, taught, reduction="batchmean", log_target=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.trainer.estimated_stepping_batches
        return configure(self.target.parameters(), self.optimizer, self.scheduler, steps)

    def export(self, folder: Path) -> None:
        """Write the tuned model as `target.safetensors`, which timm loads as a checkpoint."""
        save_target(self.target, folder / "target.safetensors")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The teacher stays out of the checkpoint: it is the model that the configuration names."""
        checkpoint["state_dict"] = without_part(checkpoint["state_dict"], "teacher")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = with_part(checkpoint["state_dict"], "teacher", self.teacher)
