"""Fine-tunes the target on masked images (Jethani et al., 2021; Covert et al., 2022)."""

import copy
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.masking import PatchGrid, mask_pixels
from explainers.metrics.means import Ratios
from explainers.models import TargetModel
from explainers.models.fetching import save_target
from explainers.runtime.sampling import stream
from explainers.shapley.coalition_draws import random_coalitions
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.training_module import TrainingModule


class Surrogate(TrainingModule):
    """Tunes the target to predict from an image with removed patches what it predicts from the whole image.

    Minimises KL(f(x) ‖ f_s(x_S)), where f is the original target, f_s the tuned one, and the size of S is uniform in
    0 ... N. At the minimum, f_s(x_S) is the expectation of f(x) given the visible patches. f(x_S) itself is not,
    because f was not trained on images with removed patches.

    The other arguments are those of `TrainingModule`.

    Args:
        target: the model; one copy is tuned, and another, frozen one is the teacher.
        grid: the patches that are removed.
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
        if target.score != "softmax":
            raise InputError(f"expected score=softmax for a surrogate, got {target.score}: take KernelSHAP", "score")
        super().__init__(optimizer, scheduler, min_crop, seed, frozen=("teacher",))
        self.teacher = copy.deepcopy(target).requires_grad_(False)
        target.check_grid(grid)
        self.target = copy.deepcopy(target).requires_grad_(True)
        self.grid = grid
        self.val_loss = Ratios()
        self.train()  # the trainer keeps the current mode of every module

    @property
    def sources(self) -> tuple[()]:
        raise InputError("a surrogate sees every image under new masks in every epoch: expected cache=none")

    def forward(self, images: Tensor) -> Tensor:
        """Predict: uint8 images (B, C, H, W) → logits (B, K)."""
        return self.target(images)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self.augment_images(batch), self.current_epoch)
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        images = len(batch["index"])
        self.val_loss.update(self.loss(batch) * images, images)
        self.log("val/loss", self.val_loss, prog_bar=True)

    def loss(self, batch: dict[str, Tensor], epoch: int = 0) -> Tensor:
        """KL(f(x) ‖ f_s(x_S)), averaged over images, with one coalition S of each image."""
        images = batch["image"]
        seed = stream("coalitions", self.seed, epoch)
        keep = random_coalitions(batch["index"], self.grid.num_patches, 1, seed)[:, 0]  # (B, N)
        with torch.no_grad():
            wanted = self.teacher(images).log_softmax(-1)
        masked = mask_pixels(self.target.normalise(images), keep, self.grid)
        predicted = self.target.classify(self.target.embed(masked)).log_softmax(-1)
        return F.kl_div(predicted, wanted, reduction="batchmean", log_target=True)

    def export(self, folder: Path) -> None:
        """Write the tuned model to `target.safetensors`, which timm loads as a checkpoint."""
        save_target(self.target, folder / "target.safetensors")
