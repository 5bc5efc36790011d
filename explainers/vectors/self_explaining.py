"""Models that predict and explain themselves at once, with one fixed head (Yoshikawa et al., 2025)."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.metrics.agreement import RankCorrelation
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.sources import Pixels, Source, complete
from explainers.target import TargetModel, weights_hash
from explainers.training.module import TrainingModule
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.state_dicts import check_alike, part
from explainers.training.weights import read_network, save_network
from explainers.vectors.heads import FixedHead, ProjectionBuilder

LabelBuilder = Callable[[TargetModel, PatchGrid], ShapleyLabels]


class SelfExplaining(TrainingModule):
    """A classifier whose fixed head reads the attribution of every patch from the patch's own embedding.

    Minimises α · CE + (1 − α) · MSE: the cross entropy of the labels, and the mean squared error of the attributions of
    one class, or all, to the patches. With α = 1 it is the prediction-only twin, which needs none to learn from.

    Args:
        target: the base model. Its backbone is trained; its head gives way to a `FixedHead`.
        grid: the patches that are explained; embeddings of finer ones are averaged.
        projection: finds W of the classes of the trainer's datamodule. Where W is of another width than the embeddings,
            the model's own head, which CLIP's visual projection is, comes between.
        normalise, scale, scale_patches: see `FixedHead`.
        alpha: α.
        labels: builds the source of the attributions to learn, from the model of `teacher` and the grid.
        teacher: the file (`export`) of the model that these attributions explain, such as the prediction-only twin.
        weights: a trained model (`export`) to go on with, head and all; then there is no `projection`.
        optimizer, scheduler: build the optimiser of the backbone, and its schedule.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        projection: ProjectionBuilder | None = None,
        normalise: bool = True,
        scale: float = 10.0,
        scale_patches: bool = False,
        alpha: float = 0.8,
        labels: LabelBuilder | None = None,
        teacher: str | None = None,
        weights: str | None = None,
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
    ) -> None:
        if not 0 < alpha <= 1:
            raise InputError(f"expected alpha above 0 and at most 1, where nothing is explained, got {alpha}")
        super().__init__(optimizer, scheduler, frozen=() if teacher is None else ("teacher",))
        self.target, self.grid, self.alpha = target, grid, alpha
        self.projection, self.normalise, self.scale, self.scale_patches = projection, normalise, scale, scale_patches
        self.teacher = None if teacher is None else exported_target(target, teacher).requires_grad_(False)
        self.sources: tuple[Source, ...] = (Pixels(),)
        if alpha < 1 and labels is not None and self.teacher is not None:
            self.sources += (labels(self.teacher, grid),)
        self.base_hash = weights_hash(target.backbone)
        self.val_loss, self.accuracy = MeanMetric(), MeanMetric()
        self.rank_correlation = RankCorrelation(nan_strategy="ignore")
        if weights is not None:
            self.target = exported_target(target, weights)
        self.train()  # the trainer keeps every module in the mode it finds it in

    def setup(self, stage: str) -> None:
        """Find the head of the datamodule's classes, unless there is one already."""
        if stage == "fit" and self.alpha < 1 and len(self.sources) == 1:
            raise InputError(
                f"expected explainer.labels and explainer.teacher, a file, for alpha={self.alpha}, got none: "
                "train the prediction-only twin first, with alpha=1"
            )
        if not isinstance(self.target.head, FixedHead):
            if self.projection is None:
                raise InputError("expected explainer.projection or explainer.weights to make a head of, got neither")
            data: Any = getattr(self.trainer, "datamodule")  # noqa: B009, Lightning does not declare it
            self.target.head = self._head(self.projection(self.target.eval(), data).to(self.device))
            self.train()

    def _head(self, weight: Tensor) -> FixedHead:
        between = None
        if weight.shape[1] != self.target.embed_dim:
            between = getattr(self.target.head, "weight", torch.empty(0)).detach()
            if between.shape[:1] != weight.shape[1:]:
                raise InputError(
                    f"expected W for embeddings of width {self.target.embed_dim}, or a model that projects them to"
                    f" {weight.shape[1]}, got a head of {list(between.shape)}: take CLIP's own image tower"
                )
        return FixedHead(weight, between, self.normalise, self.scale, self.scale_patches)

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted ones, in uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        logits, attributions = self.look(images)
        classes = logits.argmax(-1) if classes is None else classes
        return attributions[torch.arange(len(images)), :, classes].unflatten(-1, (self.grid.side, -1))

    def logits(self, images: Tensor) -> Tensor:
        """Predict: uint8 images (B, C, H, W) → logits (B, K)."""
        return self.target(images)

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, K), and the attributions of all patches to all classes (B, N, K), of uint8 images (B, C, H, W)."""
        embeddings, patches = self.target.embed_with_patches(self.target.normalise(images))
        with torch.autocast(images.device.type, enabled=False):
            attributions = self.target.head.attributions(patch_means(patches.float(), self.grid.side))
        return self.target.classify(embeddings), attributions

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        seen = complete(batch, self.sources)
        logits, attributions = self.look(seen["image"])
        loss = self._loss(logits, attributions, seen)
        self.log("train/loss", loss, batch_size=len(logits))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        seen = complete(batch, self.sources)
        logits, attributions = self.look(seen["image"])
        self.val_loss.update(self._loss(logits, attributions, seen), len(logits))
        self.accuracy.update((logits.argmax(-1) == seen["label"]).float())
        self.log_dict({"val/loss": self.val_loss, "val/accuracy": self.accuracy}, prog_bar=True)
        if self.alpha < 1:
            self.rank_correlation.update(explained(attributions, seen), seen["shapley"])
            self.log("val/rank_correlation", self.rank_correlation, prog_bar=True)

    def _loss(self, logits: Tensor, attributions: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """α · CE + (1 − α) · MSE."""
        loss = self.alpha * F.cross_entropy(logits, seen["label"])
        if self.alpha < 1:
            error = explained(attributions, seen) - seen["shapley"]
            loss = loss + (1 - self.alpha) * error.square().mean()
        return loss

    def provenance(self) -> dict[str, str]:
        """What was trained, from which base model and how; it is written into the exported file."""
        head = self.target.head
        options = {"normalise": head.normalise, "scale_patches": head.scale_patches}
        return self.target.identity() | {
            "base_sha256": self.base_hash,
            "alpha": str(self.alpha),
            "patches_per_side": str(self.grid.side),
            "head": json.dumps(options),
        }

    def export(self, folder: Path) -> Path:
        """Write backbone and head as `model.safetensors`, with what they are."""
        return save_network(self.target, folder / "model.safetensors", self.provenance())


def patch_means(patches: Tensor, side: int) -> Tensor:
    """Embeddings of patches (B, N', D) on a coarser grid, (B, N, D): means of those that make up each of its patches.

    Raises:
        InputError: where they do not fit into the grid.
    """
    own = math.isqrt(patches.shape[1])
    if own % side:
        raise InputError(
            f"expected a grid that {own} x {own} patches of the model fit in, got {side} x {side}: set grid.patch_size"
        )
    blocks = patches.unflatten(1, (side, own // side, side, own // side))
    return blocks.mean((2, 4)).flatten(1, 2)


def explained(attributions: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """Of attributions to all classes (B, N, K), those that the rows of `ShapleyLabels` are of: (B, N), or all."""
    if "explained" not in seen:
        return attributions
    return attributions.take_along_dim(seen["explained"][:, None, None], -1)[..., 0]


def exported_target(model: TargetModel | nn.Module, head: str | Path) -> TargetModel:
    """The model that a `SelfExplaining` exported, head and all, to predict with and to be explained.

    Args:
        model: a target or a timm model of the same architecture.
        head: the file.

    Raises:
        InputError: if the file holds another architecture.
    """
    identity, weights = read_network(head)
    target = copy.deepcopy(model) if isinstance(model, TargetModel) else TargetModel(model)
    if "head" not in identity or "head.weight" not in weights:
        raise InputError(f"expected the model.safetensors of a self-explaining model, got {head}")
    check_alike(target.backbone.state_dict(), part(weights, "backbone"))
    fixed = part(weights, "head")
    target.backbone.load_state_dict(part(weights, "backbone"))
    target.head = FixedHead(
        fixed["weight"], fixed.get("projection"), scale=fixed["scale"].item(), **json.loads(identity["head"])
    )
    return target.eval()
