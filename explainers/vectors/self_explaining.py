"""Models that predict and explain themselves in one forward pass, and their training (Yoshikawa et al., 2025)."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from explainers.errors import InputError, check_positive, check_range, checks_choices
from explainers.learned.sources import Pixels, Source, complete
from explainers.masking import PatchGrid
from explainers.metrics.agreement import RankCorrelation
from explainers.metrics.means import Mean, Ratios
from explainers.models import TargetModel
from explainers.models.functionals import choose_temperature, score_functionals
from explainers.models.inputs import check_labels, validate_classes
from explainers.models.names import match_classes
from explainers.saved.identity import Identity, weights_hash
from explainers.saved.weights import save_weights
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.training_module import TrainingModule
from explainers.transformer.blocks import find_blocks
from explainers.vectors.fixed_head import (
    FixedHead,
    Reading,
    embed_as_read,
    fix_own_head,
    fix_projected_head,
    select_explained,
)
from explainers.vectors.model_files import exported_target
from explainers.vectors.projections import ProjectionBuilder


class SelfExplaining(nn.Module):
    """A classifier whose fixed head computes the attributions of every patch from the patch's embedding.

    Args:
        target: the model, of which a copy explains itself. Its head is a `FixedHead`, or a training fixes it.
        grid: the patches that are explained; the embeddings of smaller patches of the model are averaged.
        weights: file of a trained model (see `export`), whose backbone and head replace those of the target.
        reading: how patches are read, see `FixedHead`; `None`: as the weights do, or `patch` without weights.
        path_blocks: number of the last blocks of a transformer, at most all, whose paths are read beside the tokens of
            patches, if `reading` is given; trained tokens then learn what these paths lack.
        temperature: t of the score that `forward` explains, see `score_functionals`; `None` for the logit.
    """

    signed = True

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        weights: str | None = None,
        reading: Reading | None = None,
        path_blocks: int = 0,
        temperature: float | None = None,
    ) -> None:
        if temperature is not None:
            check_positive(temperature=temperature)
        target.check_grid(grid)
        super().__init__()
        self.target = copy.deepcopy(target) if weights is None else exported_target(target, weights)
        self.grid = grid
        self.weights = weights
        self.reading = reading
        self.path_blocks = path_blocks
        self.temperature = temperature
        self.base_hash = weights_hash(target.backbone)
        if weights is not None and (reading or path_blocks):
            self.take_head(self.target.head)

    def take_head(self, head: FixedHead) -> None:
        """Replace the head by one of the same logits that reads patches as this explainer does."""
        count = len(find_blocks(self.target)) if self.path_blocks else 0
        blocks = range(max(0, count - self.path_blocks), count)
        fixed = head.read_as(self.reading or "patch", head.patch_scale.item(), blocks)
        self.target.head = fixed.to(self.target.mean.device)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, but BatchNorm keeps the statistics of the base model, which arithmetic cannot transfer."""
        super().train(mode)
        for module in self.target.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        return self

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted, in images (B, C, H, W): heatmaps (B, rows, columns)."""
        logits, attributions = self.predict_and_explain(images)
        classes = validate_classes(logits.argmax(-1) if classes is None else classes, images, logits.shape[-1])
        temperature = choose_temperature(self.target.score, self.temperature)
        logits_to_score = score_functionals(torch.eye(logits.shape[-1]).to(logits), logits, temperature, classes)
        return (attributions @ logits_to_score[..., None]).view(-1, *self.grid.shape)

    def logits(self, images: Tensor) -> Tensor:
        """Classify uint8 images (B, C, H, W) → logits (B, K)."""
        self.grid.check(images)
        return self.target(images)

    def predict_and_explain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Predict and explain uint8 images (B, C, H, W): logits (B, K) and attributions to all classes (B, N, K)."""
        embeddings, patches, paths = embed_as_read(self.target, self.grid, images)
        with torch.autocast(images.device.type, enabled=False):
            attributions = self.target.head.attributions(patches, embeddings.float(), paths)
        return self.target.classify(embeddings), attributions

    def provenance(self, alpha: float | str) -> Identity:
        """Describe the model, for the header of its file.

        Args:
            alpha: α of its training, 1 without attributions; or `TRANSFERRED`.
        """
        return {
            "class": "SelfExplaining",
            "grid": {"image_size": self.grid.image_size, "patch_size": self.grid.patch_size},
            "model": self.target.timm_name,
            "target": self.target.identity(),
            "classes": self.target.classes,
            "base_sha256": self.base_hash,
            "alpha": alpha,
            "head": {name: getattr(self.target.head, name) for name in ("normalise", "reading", "blocks")},
        }

    def export(self, folder: Path, alpha: float = 1.0) -> Path:
        """Write the backbone and the head with their `provenance` to `model.safetensors`."""
        return save_weights(self.target.state_dict(), folder / "model.safetensors", self.provenance(alpha))


class HeadBuilder:
    """Builds the fixed head of a model that learns to explain itself.

    Args:
        projection: computes W for the classes of a datamodule. If the width of W is not the width of the embeddings,
            the model's own head, CLIP's visual projection, is applied before W. `None` fixes the model's own head.
        scale: see `FixedHead`; it has no effect on the model's own head.
        patch_scale: see `FixedHead`; `None` for `SelfDistillation`, which computes it from its first batch.
    """

    def __init__(
        self, projection: ProjectionBuilder | None = None, scale: float = 10.0, patch_scale: float | None = 1.0
    ) -> None:
        check_positive(scale=scale, patch_scale=1.0 if patch_scale is None else patch_scale)
        self.projection = projection
        self.scale = scale
        self.patch_scale = patch_scale

    def __call__(self, target: TargetModel, data: Any) -> FixedHead:
        """Build the head for the classes of a datamodule, which become the target's."""
        classes = list(getattr(data, "classes", ()))
        if self.projection is not None:
            target.classes = classes
            weight = self.projection(target.eval(), data).to(target.mean.device)
            head = fix_projected_head(target, weight, self.scale)
        elif match_classes(classes, target) == list(range(target.num_classes)):
            head = fix_own_head(target)
        else:
            raise InputError(
                f"expected images of all classes of the head in its order, got {len(classes)} classes in another: give"
                " the images of its training, or projection=",
                "projection",
            )
        return head.read_as("patch", self.patch_scale or 1.0)


def fix_head(explainer: SelfExplaining, head: HeadBuilder, data: Any) -> None:
    """Fix the head of a model for the classes of a datamodule, unless it is fixed."""
    if not isinstance(explainer.target.head, FixedHead):
        explainer.take_head(head(explainer.target, data))
        explainer.train(explainer.training)  # a projection needs the target in eval mode


def learn_last_blocks(target: TargetModel, count: int | None) -> None:
    """Freeze the backbone, a transformer of timm, except for its last blocks and what follows them; `None`: nothing.

    An explainability vector is then 0 in the frozen part. It takes less time to learn, and changes predictions less.
    """
    if count is None:
        return
    blocks = find_blocks(target)
    check_range(1, len(blocks), last_blocks=count)
    first, learns = next(blocks[-count].parameters()), False
    for parameter in target.backbone.parameters():  # in the order of the computation
        learns = learns or parameter is first
        parameter.requires_grad_(learns)


LabelBuilder = Callable[[TargetModel, PatchGrid], Any]
"""Builds a source of attributions from the model that they explain, such as `ShapleyLabels`."""


class SelfTraining(TrainingModule):
    """What trainings of a model that explains itself share: the model, its head, α, and the blocks that learn."""

    def __init__(
        self,
        explainer: SelfExplaining,
        head: HeadBuilder,
        alpha: float,
        last_blocks: int | None,
        optimizer: OptimizerBuilder | None,
        scheduler: SchedulerBuilder | None,
        frozen: tuple[str, ...] = (),
    ) -> None:
        super().__init__(optimizer, scheduler, frozen=frozen)
        self.explainer = explainer
        self.head = head
        self.alpha = alpha
        learn_last_blocks(explainer.target, last_blocks)

    def setup(self, stage: str) -> None:
        """Build the head for the classes of the datamodule."""
        fix_head(self.explainer, self.head, getattr(self.trainer, "datamodule", None))

    def forward(self, images: Tensor) -> Tensor:
        """Explain the predicted classes of uint8 images (B, C, H, W): heatmaps (B, rows, columns)."""
        return self.explainer(images)

    def export(self, folder: Path) -> Path:
        """Write the trained model, see `SelfExplaining.export`."""
        return self.explainer.export(folder, self.alpha)


class SelfExplainingTraining(SelfTraining):
    """Trains a model to predict labels, and to explain its predictions as labels of attributions do (the paper).

    It minimises α · L_predict + (1 − α) · L_explain: the cross entropy, and the mean squared error of the attributions
    of the patches to one class, or to all classes. With α = 1, it learns predictions alone: the prediction-only twin.

    Args:
        explainer: the model, whose backbone is trained in place.
        head: builds its head, unless it was loaded with one.
        labels: builds the source of the attributions to learn, `ShapleyLabels`, from the teacher and the grid; without
            effect with α = 1.
        teacher: the model that these attributions explain: the file of the prediction-only twin, or `base` for the
            model before this training; `None` with α = 1.
        alpha: α, in (0, 1].
        last_blocks: number of the last blocks that learn, see `learn_last_blocks`.
        optimizer: builds the optimiser from the parameters of the backbone.
        scheduler: builds the schedule from the optimiser and the number of steps.
    """

    def __init__(
        self,
        explainer: SelfExplaining,
        head: HeadBuilder,
        labels: LabelBuilder | None = None,
        teacher: str | None = None,
        alpha: float = 0.8,
        last_blocks: int | None = None,
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
    ) -> None:
        if not 0 < alpha <= 1:
            raise InputError(f"expected alpha above 0 and at most 1 (1 learns predictions alone), got {alpha}", "alpha")
        check_positive(patch_scale=head.patch_scale)  # type: ignore[arg-type]
        frozen = () if teacher is None else ("teacher",)
        super().__init__(explainer, head, alpha, last_blocks, optimizer, scheduler, frozen)
        self.teacher: Any = None
        if teacher is not None:
            target = explainer.target
            self.teacher = copy.deepcopy(target) if teacher == "base" else exported_target(target, teacher)
            self.teacher.eval().requires_grad_(False)
        self.sources: list[Source] = [Pixels()]
        if alpha < 1:
            if labels is None or self.teacher is None:
                wanted = f"labels=, and teacher=, a file or base, for alpha={alpha}"
                advice = "train the prediction-only twin first, with alpha=1"
                raise InputError(f"expected {wanted}, got none: {advice}", "teacher", "labels", "alpha")
            self.sources.append(labels(self.teacher, explainer.grid))
        self.val_loss = Ratios()
        self.accuracy = Mean()
        self.rank_correlation = RankCorrelation()
        self.train()  # the trainer keeps the current mode of every module

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = complete(batch, self.sources, self.current_epoch)
        loss = self._loss(*self._predict(rows), rows)
        self.log("train/loss", loss, batch_size=len(rows["image"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = complete(batch, self.sources)
        logits, attributions = self._predict(rows)
        self.val_loss.update(self._loss(logits, attributions, rows) * len(logits), len(logits))
        self.accuracy.update((logits.argmax(-1) == rows["label"]).float())
        self.log("val/loss", self.val_loss, prog_bar=True)
        self.log("val/accuracy", self.accuracy, prog_bar=True)
        if self.alpha < 1:
            self.rank_correlation.update(attributions, rows["shapley"])
            self.log("val/rank_correlation", self.rank_correlation, prog_bar=True)

    def _predict(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (B, K), and the attributions that the labels have: (B, N) of one class, or (B, N, K)."""
        logits, attributions = self.explainer.predict_and_explain(rows["image"])
        return logits, select_explained(attributions, rows)

    def _loss(self, logits: Tensor, attributions: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """α · L_predict + (1 − α) · L_explain."""
        check_labels(rows["label"], logits.shape[-1], "projection= for their classes", "projection")
        with torch.autocast(logits.device.type, enabled=False):
            loss = self.alpha * F.cross_entropy(logits, rows["label"])
            if self.alpha < 1:
                loss = loss + (1 - self.alpha) * F.mse_loss(attributions, rows["shapley"])
        return loss
