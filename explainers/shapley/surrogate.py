"""A copy of the target that is at home with masked images (Jethani et al., 2021; Covert et al., 2022)."""

import copy
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric

from explainers.errors import InputError
from explainers.masking import PatchGrid, mask_pixels
from explainers.sampling import random_coalitions, stream
from explainers.target import TargetModel
from explainers.target_files import save_target
from explainers.training.module import TrainingModule
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder


class Surrogate(TrainingModule):
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
        super().__init__(optimizer, scheduler, min_crop, seed, frozen=("teacher",))
        self.teacher = copy.deepcopy(target).requires_grad_(False)
        self.target, self.grid = target.requires_grad_(True), grid
        self.val_loss = MeanMetric()
        self.train()  # the trainer keeps every module in the mode it finds it in

    @property
    def sources(self) -> tuple[()]:
        raise InputError("a surrogate sees every image under new masks in every epoch: expected cache=null")

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) → logits (B, K)."""
        return self.target(images)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(self.augmented(batch), self.current_epoch)
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

    def export(self, folder: Path) -> None:
        """Write the tuned model as `target.safetensors`, which timm loads as a checkpoint."""
        save_target(self.target, folder / "target.safetensors")
