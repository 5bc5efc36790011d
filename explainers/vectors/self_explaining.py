"""Models that predict and explain themselves in one forward pass, with a fixed head (Yoshikawa et al., 2025)."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torchmetrics import MeanMetric

from explainers.errors import InputError, check_positive, checks_choices
from explainers.masking import PatchGrid
from explainers.metrics.agreement import RankCorrelation
from explainers.saved.identity import Identity, weights_hash
from explainers.saved.weights import save_weights
from explainers.share import Loadable
from explainers.target import TargetModel
from explainers.target.inputs import check_labels, checked_classes
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.sources import Features, Pixels, Source, complete
from explainers.training.training_module import TrainingModule
from explainers.vectors.exported import exported_target
from explainers.vectors.patches import explained, patch_means
from explainers.vectors.projections import FixedHead, ProjectionBuilder, Reading, own_head

LabelBuilder = Callable[[TargetModel, PatchGrid], Any]
"""Builds what the patches learn: `ShapleyLabels`, or a `Teacher` of `explainers.anyhead`."""


class SelfExplaining(TrainingModule, Loadable):
    """A classifier whose fixed head computes the attributions of every patch from the patch's embedding.

    Minimises α · L_predict + (1 − α) · L_explain. In the paper, L_predict is the cross entropy, and L_explain the mean
    squared error of the attributions of the patches to one class, or to all. With α = 1 it is the prediction-only twin,
    which is trained without attributions.

    A teacher of `explainers.anyhead` explains no class but the embedding itself: patches learn vectors c_z whose
    products v · c_z attribute every functional v. With its predictions held by those of the base model, the model then
    needs neither labels nor classes, and what it learned serves every head.

    Args:
        target: the base model. The backbone of a copy is trained; a `FixedHead` replaces its head.
        grid: the patches that are explained; the embeddings of smaller patches of the model are averaged.
        projection: computes W for the classes of the trainer's datamodule. If the width of W is not that of the
            embeddings, the model's own head, which is CLIP's visual projection, is applied before W. `None` fixes the
            model's own head, see `own_head`.
        normalise: see `FixedHead`; not for the model's own head.
        scale: see `FixedHead`; not for the model's own head.
        reading: see `FixedHead`; `saved` is that of `weights`, and `patch` without weights.
        patch_scale: see `FixedHead`; `None` takes that of the first batch at which the vectors c_z are as large as the
            labels' source expects, which must be a teacher of `explainers.anyhead`.
        alpha: α, in (0, 1].
        predictions: L_predict: the cross entropy with the `labels`, or the divergence from the predictions of the
            `teacher`, KL(teacher ‖ model).
        labels: builds the source of the attributions to learn, from the teacher and the grid.
        teacher: file (see `export`) of the model that these attributions explain, such as the prediction-only twin;
            `None` takes the base model itself, if it keeps its own head.
        weights: file of a trained model (see `export`) to continue from; its head replaces `projection`.
        optimizer: builds the optimiser from the parameters of the backbone.
        scheduler: builds the schedule from the optimiser and the number of steps.
    """

    weights_file = "model.safetensors"

    @classmethod
    def settings_to_load(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The grid alone: the file of weights holds the head as well."""
        return {"grid": settings["grid"], "alpha": 1}

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        projection: ProjectionBuilder | None = None,
        normalise: bool = True,
        scale: float = 10.0,
        reading: Literal["patch", "difference", "saved"] = "saved",
        patch_scale: float | None = 1.0,
        alpha: float = 0.8,
        predictions: Literal["labels", "teacher"] = "labels",
        labels: LabelBuilder | None = None,
        teacher: str | None = None,
        weights: str | None = None,
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
    ) -> None:
        if not 0 < alpha <= 1:
            raise InputError(f"expected alpha above 0 and at most 1, where nothing is explained, got {alpha}")
        check_positive(scale=scale, patch_scale=1 if patch_scale is None else patch_scale)
        self_taught = labels is not None and teacher is None and projection is None and weights is None
        super().__init__(optimizer, scheduler, frozen=("teacher",) if teacher is not None or self_taught else ())
        self.target = copy.deepcopy(target) if weights is None else exported_target(target, weights)
        if weights is not None and reading != "saved":
            self.target.head.reading = reading
        target.check_grid(grid)
        self.grid, self.alpha, self.predictions = grid, alpha, predictions
        self.projection, self.normalise, self.scale = projection, normalise, scale
        self.reading: Reading = "patch" if reading == "saved" else reading
        self.patch_scale = 1.0 if patch_scale is None else patch_scale
        self.teacher: Any = None
        if teacher is not None:
            self.teacher = exported_target(target, teacher).requires_grad_(False)
        elif self_taught:
            self.teacher = copy.deepcopy(target).eval().requires_grad_(False)
        self.labels: Any = None if alpha == 1 or labels is None or self.teacher is None else labels(self.teacher, grid)
        self.sources: tuple[Source, ...] = (Pixels(),) if self.labels is None else (Pixels(), self.labels)
        if self.teacher is not None and (predictions == "teacher" or hasattr(self.labels, "loss")):
            self.sources += (Features(self.teacher),)
        if patch_scale is None and self.labels is not None and not hasattr(self.labels, "unit"):
            raise InputError("expected a number for explainer.patch_scale with labels of a class, got null")
        self.uncalibrated = patch_scale is None and self.labels is not None
        self.base_hash = weights_hash(target.backbone)
        self.val_loss, self.accuracy = MeanMetric(), MeanMetric()
        self.rank_correlation = RankCorrelation()
        self.train()  # the trainer keeps the current mode of every module

    def train(self, mode: bool = True) -> Self:
        """Set the mode, but BatchNorm keeps the statistics of the base model, which arithmetic cannot transfer."""
        super().train(mode)
        for module in self.target.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        return self

    def setup(self, stage: str) -> None:
        """Build the head for the datamodule's classes, unless the model was loaded with its head."""
        if stage == "fit" and self.alpha < 1 and self.labels is None:
            raise InputError(
                f"expected explainer.labels and explainer.teacher, a file, for alpha={self.alpha}, got none: "
                "train the prediction-only twin first, with alpha=1"
            )
        if stage == "fit" and self.predictions == "teacher" and self.teacher is None:
            raise InputError("expected explainer.teacher, a file, for explainer.predictions=teacher, got none")
        if not isinstance(self.target.head, FixedHead):
            data: Any = getattr(self.trainer, "datamodule")  # noqa: B009, Lightning does not declare it
            if self.projection is None:
                self.target.check_classes(list(getattr(data, "classes", ())))
                self.target.head = own_head(self.target, self.reading, self.patch_scale).to(self.device)
            else:
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
        options: Any = {"reading": self.reading, "patch_scale": self.patch_scale}
        return FixedHead(weight, visual_projection, self.normalise, self.scale, **options)

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted ones, in uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        logits, attributions = self.look(images)
        classes = checked_classes(logits.argmax(-1) if classes is None else classes, images, logits.shape[-1])
        return attributions[torch.arange(images.shape[0]), :, classes].unflatten(-1, (self.grid.side, -1))

    def logits(self, images: Tensor) -> Tensor:
        """Predict: uint8 images (B, C, H, W) → logits (B, K)."""
        self.grid.check(images)
        return self.target(images)

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Predict and explain uint8 images (B, C, H, W): logits (B, K) and attributions to all classes (B, N, K)."""
        embeddings, patches = self.embed(images)
        with torch.autocast(images.device.type, enabled=False):
            attributions = self.target.head.attributions(patches, embeddings.float())
        return self.target.classify(embeddings), attributions

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Embed uint8 images (B, C, H, W), and their patches as the head reads them: (B, D) and float32 (B, N, D)."""
        self.grid.check(images)
        normalised = self.target.normalise(images)
        if self.target.head.reading == "patch":
            embeddings, patches = self.target.embed_with_patches(normalised)
            return embeddings, patch_means(patches.float(), self.grid.side)
        with_blank = torch.cat([normalised, torch.zeros_like(normalised[:1])])  # 0 is the mean colour
        embeddings, patches = self.target.embed_with_patches(with_blank)
        return embeddings[:-1], patch_means(patches[:-1].float(), self.grid.side) - embeddings[-1:, None].float()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = complete(batch, self.sources)
        loss = self._losses(rows)[0]
        self.log("train/loss", loss, batch_size=len(rows["image"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = complete(batch, self.sources)
        loss, agrees, attributions = self._losses(rows)
        self.val_loss.update(loss, len(agrees))
        self.accuracy.update(agrees.float())
        self.log_dict({"val/loss": self.val_loss, "val/accuracy": self.accuracy}, prog_bar=True)
        if attributions is not None:
            self.rank_correlation.update(attributions, rows["shapley"])
            self.log("val/rank_correlation", self.rank_correlation, prog_bar=True)

    def _losses(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """α · L_predict + (1 − α) · L_explain, which predictions are right (B,), and attributions that have labels."""
        embeddings, patches = self.embed(rows["image"])
        logits, wanted, attributions = self.target.classify(embeddings), self._wanted(rows), None
        with torch.autocast(patches.device.type, enabled=False):
            if self.training and self.uncalibrated and self.global_step == 0:
                self._calibrate(patches, rows)
            entropy = torch.special.entr(wanted).sum(-1).mean()  # 0 for labels
            loss = self.alpha * (F.cross_entropy(logits, wanted) - entropy)
            if "shapley" in rows:
                attributions = explained(self.target.head.attributions(patches, embeddings.float()), rows)
                loss = loss + (1 - self.alpha) * F.mse_loss(attributions, rows["shapley"])
            elif self.labels is not None:
                loss = loss + (1 - self.alpha) * self.labels.loss(self.target.head.vectors(patches), rows)
        return loss, logits.argmax(-1) == wanted.argmax(-1), attributions

    def _wanted(self, rows: dict[str, Tensor]) -> Tensor:
        """The probabilities to predict, (B, K): 1 for the label, or those of the teacher."""
        if self.predictions == "teacher":
            return self.teacher.classify(rows["embedding"]).softmax(-1)
        check_labels(rows["label"], self.target.num_classes, "explainer.projection for their classes")
        return F.one_hot(rows["label"], self.target.num_classes).float()

    @torch.no_grad()
    def _calibrate(self, patches: Tensor, rows: dict[str, Tensor]) -> None:
        """Set the scale of the patches, without which nothing is learned: they can be hundreds of times too large."""
        self.uncalibrated = False
        factor = self.labels.unit(rows) / self.target.head.vectors(patches).std()
        self.target.head.patch_scale *= self.of_all_processes(factor).mean()

    def provenance(self) -> Identity:
        """The identity of the exported file: the model, its base model, α, the grid and the options of the head."""
        head = self.target.head
        return {
            "target": self.target.identity(),
            "classes": self.target.classes,
            "base_sha256": self.base_hash,
            "alpha": self.alpha,
            "patches_per_side": self.grid.side,
            "head": {"normalise": head.normalise, "reading": head.reading},
        }

    def export(self, folder: Path) -> Path:
        """Write the backbone and the head with their `provenance` to `model.safetensors`."""
        return save_weights(self.target.state_dict(), folder / self.weights_file, self.provenance())
