"""Models that predict and explain themselves in one forward pass, with a fixed head (Yoshikawa et al., 2025)."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from explainers.errors import InputError, check_positive
from explainers.identity import Identity, weights_hash
from explainers.inputs import check_labels, checked_classes
from explainers.masking import PatchGrid
from explainers.metrics.agreement import RankCorrelation
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.sources import Pixels, Source, complete
from explainers.target import TargetModel
from explainers.training.module import TrainingModule
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.state_dicts import check_alike, part
from explainers.vectors.heads import FixedHead, ProjectionBuilder
from explainers.weight_files import check_identity, read_weights, save_weights

LabelBuilder = Callable[[TargetModel, PatchGrid], ShapleyLabels]


class SelfExplaining(TrainingModule):
    """A classifier whose fixed head computes the attributions of every patch from the patch's embedding.

    Minimises α · CE + (1 − α) · MSE: the cross entropy of the predictions, and the mean squared error of the
    attributions of the patches to one class, or to all. With α = 1 it is the prediction-only twin, which is trained
    without attributions.

    Args:
        target: the base model. Its backbone is trained; a `FixedHead` replaces its head.
        grid: the patches that are explained; the embeddings of smaller patches of the model are averaged.
        projection: computes W for the classes of the trainer's datamodule. If the width of W is not that of the
            embeddings, the model's own head, which is CLIP's visual projection, is applied before W.
        normalise: see `FixedHead`.
        scale: see `FixedHead`.
        scale_patches: see `FixedHead`.
        alpha: α, the weight of the cross entropy, in (0, 1].
        labels: builds the source of the attributions to learn, from the model of `teacher` and the grid.
        teacher: file (see `export`) of the model that these attributions explain, such as the prediction-only twin.
        weights: file of a trained model (see `export`) to continue from; its head replaces `projection`.
        optimizer: builds the optimiser from the parameters of the backbone.
        scheduler: builds the schedule from the optimiser and the number of steps.
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
        check_positive(scale=scale)
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
        self.train()  # the trainer keeps the current mode of every module

    def setup(self, stage: str) -> None:
        """Build the head for the datamodule's classes, unless the model was loaded with its head."""
        if stage == "fit" and self.alpha < 1 and len(self.sources) == 1:
            raise InputError(
                f"expected explainer.labels and explainer.teacher, a file, for alpha={self.alpha}, got none: "
                "train the prediction-only twin first, with alpha=1"
            )
        if not isinstance(self.target.head, FixedHead):
            if self.projection is None:
                raise InputError("expected explainer.projection or explainer.weights to make a head of, got neither")
            data: Any = getattr(self.trainer, "datamodule")  # noqa: B009, Lightning does not declare it
            self.target.classes = list(data.classes)
            self.target.head = self._head(self.projection(self.target.eval(), data).to(self.device))
            self.train()

    def _head(self, weight: Tensor) -> FixedHead:
        """The fixed head of W, after the model's own head if the width of W requires it."""
        visual_projection = None
        if weight.shape[1] != self.target.embed_dim:
            visual_projection = getattr(self.target.head, "weight", torch.empty(0)).detach()
            if visual_projection.shape[:1] != weight.shape[1:]:
                raise InputError(
                    f"expected W for embeddings of width {self.target.embed_dim}, or a model that projects them to"
                    f" {weight.shape[1]}, got a head of {list(visual_projection.shape)}: take CLIP's own image tower"
                )
        return FixedHead(weight, visual_projection, self.normalise, self.scale, self.scale_patches)

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted ones, in uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        self.grid.check(images)
        logits, attributions = self.look(images)
        classes = checked_classes(logits.argmax(-1) if classes is None else classes, images, logits.shape[-1])
        return attributions[torch.arange(len(images)), :, classes].unflatten(-1, (self.grid.side, -1))

    def logits(self, images: Tensor) -> Tensor:
        """Predict: uint8 images (B, C, H, W) → logits (B, K)."""
        return self.target(images)

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Predict and explain uint8 images (B, C, H, W): logits (B, K) and attributions to all classes (B, N, K)."""
        embeddings, patches = self.target.embed_with_patches(self.target.normalise(images))
        with torch.autocast(images.device.type, enabled=False):
            attributions = self.target.head.attributions(patch_means(patches.float(), self.grid.side))
        return self.target.classify(embeddings), attributions

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = complete(batch, self.sources)
        logits, attributions = self.look(rows["image"])
        loss = self._loss(logits, attributions, rows)
        self.log("train/loss", loss, batch_size=len(logits))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = complete(batch, self.sources)
        logits, attributions = self.look(rows["image"])
        self.val_loss.update(self._loss(logits, attributions, rows), len(logits))
        self.accuracy.update((logits.argmax(-1) == rows["label"]).float())
        self.log_dict({"val/loss": self.val_loss, "val/accuracy": self.accuracy}, prog_bar=True)
        if self.alpha < 1:
            self.rank_correlation.update(explained(attributions, rows), rows["shapley"])
            self.log("val/rank_correlation", self.rank_correlation, prog_bar=True)

    def _loss(self, logits: Tensor, attributions: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """α · CE + (1 − α) · MSE."""
        check_labels(rows["label"], logits.shape[-1], "explainer.projection for their classes")
        loss = self.alpha * F.cross_entropy(logits, rows["label"])
        if self.alpha < 1:
            error = explained(attributions, rows) - rows["shapley"]
            loss = loss + (1 - self.alpha) * error.square().mean()
        return loss

    def provenance(self) -> Identity:
        """The identity of the exported file: the model, its base model, α, the grid and the options of the head."""
        head = self.target.head
        return {
            "target": self.target.identity(),
            "classes": self.target.classes,
            "base_sha256": self.base_hash,
            "alpha": self.alpha,
            "patches_per_side": self.grid.side,
            "head": {"normalise": head.normalise, "scale_patches": head.scale_patches},
        }

    def export(self, folder: Path) -> Path:
        """Write the backbone and the head with their `provenance` to `model.safetensors`."""
        return save_weights(self.target.state_dict(), folder / "model.safetensors", self.provenance())


def patch_means(patches: Tensor, side: int) -> Tensor:
    """Average the patch embeddings (B, N', D) of a fine grid over the patches of a coarser one: (B, N, D).

    >>> patch_means(torch.arange(16.0).view(1, 16, 1), side=2).flatten().tolist()  # the first is (0 + 1 + 4 + 5) / 4
    [2.5, 4.5, 10.5, 12.5]

    Args:
        patches: patch embeddings, (B, N', D).
        side: patches per side of the coarser grid, √N.

    Raises:
        InputError: if √N' is not a multiple of `side`.
    """
    own = math.isqrt(patches.shape[1])
    if own % side:
        raise InputError(
            f"expected a grid that {own} x {own} patches of the model fit in, got {side} x {side}: set grid.patch_size"
        )
    blocks = patches.unflatten(1, (side, own // side, side, own // side))
    return blocks.mean((2, 4)).flatten(1, 2)


def explained(attributions: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """Select the attributions to the class that `ShapleyLabels` explains in each image.

    >>> attributions = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # of two patches to two classes
    >>> explained(attributions, {"explained": torch.tensor([1])}).tolist()
    [[2.0, 4.0]]

    Args:
        attributions: attributions to all classes, (B, N, K).
        seen: the rows of `ShapleyLabels`, which lack `explained` where they explain all classes.

    Returns:
        (B, N), or (B, N, K) if all classes are explained.
    """
    if "explained" not in seen:
        return attributions
    return attributions.take_along_dim(seen["explained"][:, None, None], -1)[..., 0]


def exported_target(model: TargetModel | nn.Module, head: str | Path) -> TargetModel:
    """Load the model that a `SelfExplaining` exported, with its fixed head.

    Args:
        model: a target or a timm model of the same architecture.
        head: the `model.safetensors` of the export.

    Raises:
        InputError: if the file holds another architecture, or was not written by `SelfExplaining.export`.
    """
    identity, weights = read_weights(head)
    target = copy.deepcopy(model) if isinstance(model, TargetModel) else TargetModel(model)
    if "head" not in identity or "head.weight" not in weights:
        raise InputError(f"expected the model.safetensors of a self-explaining model, got {head}")
    check_alike(target.backbone.state_dict(), part(weights, "backbone"), str(head))
    own = target.backbone_identity()
    check_identity(identity["target"], {key: own[key] for key in own if key != "backbone_sha256"}, head)
    fixed = part(weights, "head")
    target.backbone.load_state_dict(part(weights, "backbone"))
    target.head = FixedHead(fixed["weight"], fixed.get("projection"), scale=fixed["scale"].item(), **identity["head"])
    target.classes = identity["classes"]
    return target.eval()
