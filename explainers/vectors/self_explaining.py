"""Models that predict and explain themselves in one forward pass, with a fixed head (Yoshikawa et al., 2025)."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from explainers.errors import InputError, check_positive, check_range, checks_choices
from explainers.masking import PatchGrid
from explainers.metrics.agreement import RankCorrelation
from explainers.metrics.means import Mean, Metric, Ratios
from explainers.models import TargetModel
from explainers.models.functionals import choose_temperature, score_functionals
from explainers.models.inputs import check_labels, validate_classes
from explainers.models.names import match_classes
from explainers.saved.identity import Identity, weights_hash
from explainers.saved.weights import save_weights
from explainers.training.network_explainer import gather_processes
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.sources import Features, Pixels, Source, complete
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

Predictions = Literal["labels", "teacher", "embedding"]
"""`labels`: the cross entropy with the labels. `teacher`: the divergence from the teacher's predictions,
KL(teacher ‖ model). `embedding`: the `relative_error` of the teacher's embedding, which holds the predictions of every
head, and not only those of the teacher's."""


def relative_error(embeddings: Tensor, wanted: Tensor) -> Tensor:
    """Σ |e − ê|² / Σ |ê − mean ê|² over the images of a batch: 1 if all embeddings are the mean of the wanted ones ê.

    >>> relative_error(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]])).item()
    1.0

    Raises:
        InputError: for a single image, which does not vary.
    """
    if len(wanted) < 2:
        raise InputError(
            "predictions=embedding: expected batches of 2 images or more, because errors are divided by their"
            f" variation, got {len(wanted)}: take larger batches",
            "predictions",
        )
    variation = (wanted - wanted.mean(0)).square().sum()
    return (embeddings - wanted).square().sum() / variation.clamp(min=1e-8)


class EmbeddingError(Metric):
    """The `relative_error` of all images of all processes, however they are divided into batches.

    >>> metric = EmbeddingError(width=1)
    >>> for wanted in (0.0, 2.0):
    ...     metric.update(torch.tensor([[1.0]]), torch.tensor([[wanted]]))
    >>> metric.compute().item()
    1.0

    Args:
        width: D, width of the embeddings.
    """

    full_state_update = False
    errors: Tensor
    squares: Tensor
    total: Tensor
    images: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, size in (("errors", ()), ("squares", ()), ("total", (width,)), ("images", ())):
            self.add_state(name, torch.zeros(size, dtype=torch.double), dist_reduce_fx="sum")

    def update(self, embeddings: Tensor, wanted: Tensor) -> None:
        wanted = wanted.double()
        self.errors += (embeddings.double() - wanted).square().sum()
        self.squares += wanted.square().sum()
        self.total += wanted.sum(0)
        self.images += len(wanted)

    def compute(self) -> Tensor:
        variation = self.squares - self.total.square().sum() / self.images
        return (self.errors / variation.clamp(min=1e-8)).float()


def learn_last_blocks(target: TargetModel, count: int) -> None:
    """Freeze the backbone, except for its last blocks and what follows them.

    An explainability vector is then 0 in the frozen part. It takes less time to learn, and changes predictions less.

    Args:
        target: a transformer of timm, which registers its parts in the order of the computation.
        count: number of the last blocks that learn.
    """
    blocks = find_blocks(target)
    check_range(1, len(blocks), last_blocks=count)
    first = next(blocks[-count].parameters())
    learns = False
    for parameter in target.backbone.parameters():
        learns = learns or parameter is first
        parameter.requires_grad_(learns)


LabelBuilder = Callable[[TargetModel, PatchGrid], Any]
"""Builds what the patches learn: `ShapleyLabels`, or a `Teacher` of `explainers.anyhead`."""


class SelfExplaining(TrainingModule):
    """A classifier whose fixed head computes the attributions of every patch from the patch's embedding.

    Training minimises α · L_predict + (1 − α) · L_explain. In the paper, L_predict is the cross entropy, and L_explain
    the mean squared error of the attributions of the patches to one class, or to all classes. With α = 1, the model
    learns predictions alone: it is the prediction-only twin of the paper.

    A teacher of `explainers.anyhead` explains the embedding instead of a class: patches learn vectors c_z, and v · c_z
    attributes any functional v. With `predictions` other than labels, training needs no classes and serves every head.

    Args:
        target: the base model. The backbone of a copy is trained; a `FixedHead` replaces its head.
        grid: the patches that are explained; the embeddings of smaller patches of the model are averaged.
        projection: computes W for the classes of the trainer's datamodule. If the width of W is not the width of the
            embeddings, the model's own head, CLIP's visual projection, is applied before W. `None` fixes the model's
            own head, see `fix_own_head`.
        normalise: see `FixedHead`; like `scale`, it has no effect on the model's own head.
        scale: see `FixedHead`.
        reading: see `FixedHead`; `saved` keeps the reading of `weights`, and is `patch` without weights.
        patch_scale: see `FixedHead`; `None` computes it from the first batch of a teacher of `explainers.anyhead`, so
            that the vectors c_z have the size that it expects. Another value has no effect beside `weights`.
        alpha: α, in (0, 1].
        predictions: what L_predict compares with, see `Predictions`.
        labels: builds the source of the attributions to learn, from the teacher and the grid; not used with α = 1.
        teacher: the model that these attributions explain: the file of one (see `export`), such as the prediction-only
            twin, or `base` for the base model itself; `None` to learn predictions alone.
        weights: file of a trained model (see `export`) to continue from; its head replaces `projection`.
        last_blocks: number of the last blocks of the backbone, a transformer, that learn; `None` for all of it.
        path_blocks: number of the last blocks of a transformer, at most all, whose paths the head reads beside the
            tokens of patches, see `FixedHead.read_paths`; the tokens then learn what these paths lack. If `reading` is
            `saved`, the file of `weights` decides.
        temperature: t of the score that `forward` explains, see `score_functionals`; `None` for the logit.
        optimizer: builds the optimiser from the parameters of the backbone.
        scheduler: builds the schedule from the optimiser and the number of steps.
    """

    signed = True

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        projection: ProjectionBuilder | None = None,
        normalise: bool = True,
        scale: float = 10.0,
        reading: Literal["patch", "difference", "blank_patch", "saved"] = "saved",
        patch_scale: float | None = 1.0,
        alpha: float = 0.8,
        predictions: Predictions = "labels",
        labels: LabelBuilder | None = None,
        teacher: str | None = None,
        weights: str | None = None,
        last_blocks: int | None = None,
        path_blocks: int = 0,
        temperature: float | None = None,
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
    ) -> None:
        if not 0 < alpha <= 1:
            raise InputError(f"expected alpha above 0 and at most 1 (1 learns predictions alone), got {alpha}")
        given = {"scale": scale, "patch_scale": patch_scale, "temperature": temperature}
        check_positive(**{name: number for name, number in given.items() if number is not None})
        target.check_grid(grid)
        super().__init__(optimizer, scheduler, frozen=() if teacher is None else ("teacher",))
        self.grid = grid
        self.projection = projection
        self.normalise = normalise
        self.scale = scale
        self.reading: Reading = "patch" if reading == "saved" else reading
        self.patch_scale = 1.0 if patch_scale is None else patch_scale
        self.path_blocks = path_blocks
        self.alpha = alpha
        self.temperature = temperature
        self.predictions = predictions
        self.target = copy.deepcopy(target) if weights is None else exported_target(target, weights)
        if weights is not None and reading != "saved":
            self.target.head.reading = reading
            self._read_paths(self.target.head)
        if last_blocks is not None:
            learn_last_blocks(self.target, last_blocks)
        self.base_hash = weights_hash(target.backbone)
        self.teacher: Any = None
        if teacher is not None:
            self.teacher = copy.deepcopy(target) if teacher == "base" else exported_target(target, teacher)
            self.teacher.eval().requires_grad_(False)
        self.labels: Any = None
        if self.teacher is not None and labels is not None and alpha < 1:
            self.labels = labels(self.teacher, grid)
        self.learns_vectors = hasattr(self.labels, "loss")  # from a teacher of `explainers.anyhead`
        self.sources: list[Source] = [Pixels()]
        if self.labels is not None:
            self.sources.append(self.labels)
        if self.teacher is not None and (predictions != "labels" or self.learns_vectors):
            self.sources.append(Features(self.teacher))
        self.needs_patch_scale = patch_scale is None and self.labels is not None
        if self.needs_patch_scale and not self.learns_vectors:
            raise InputError("expected a number with labels of a class, got patch_scale=None", "patch_scale")
        self.predict_loss: Any = EmbeddingError(self.target.embed_dim) if predictions == "embedding" else Ratios()
        self.explain_loss = Ratios(self.labels.ratios if self.learns_vectors else 1)
        self.accuracy = Mean()
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
            wanted = f"labels=, and teacher=, a file or base, for alpha={self.alpha}"
            advice = "train the prediction-only twin first, with alpha=1"
            raise InputError(f"expected {wanted}, got none: {advice}", "teacher", "labels", "alpha")
        if stage == "fit" and self.teacher is None and (held := self.predictions) != "labels":
            wanted = f"teacher=, a file or base, for predictions={held}"
            raise InputError(f"expected {wanted}, got none", "teacher", "predictions")
        if not isinstance(self.target.head, FixedHead):
            data: Any = getattr(self.trainer, "datamodule")  # noqa: B009, Lightning does not declare it
            self.target.head = self._head(data).to(self.device)
            self.train()

    def _head(self, data: Any) -> FixedHead:
        """Build the fixed head: the model's own head, or one for the classes of a datamodule."""
        if self.projection is None:
            classes = list(getattr(data, "classes", ()))
            if match_classes(classes, self.target) != list(range(self.target.num_classes)):
                raise InputError(
                    f"expected images of all classes of the head in its order, got {len(classes)} classes in another:"
                    " give the images of its training, or projection=",
                    "projection",
                )
            return self._read_paths(fix_own_head(self.target, self.reading, self.patch_scale))
        self.target.classes = list(data.classes)
        weight = self.projection(self.target.eval(), data).to(self.device)
        fixed = fix_projected_head(self.target, weight, self.normalise, self.scale, self.reading, self.patch_scale)
        return self._read_paths(fixed)

    def _read_paths(self, head: FixedHead) -> FixedHead:
        """Let a head read the paths of the last `path_blocks`."""
        count = len(find_blocks(self.target)) if self.path_blocks else 0
        head.read_paths(range(max(0, count - self.path_blocks), count))
        return head

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

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = complete(batch, self.sources, self.current_epoch)
        embeddings, patches, paths = embed_as_read(self.target, self.grid, rows["image"])
        logits, wanted = self.target.classify(embeddings), self._target_probabilities(rows)
        with torch.autocast(patches.device.type, enabled=False):
            loss = self.alpha * self._predict_loss(logits, wanted, embeddings, rows)
            if self.labels is not None:
                if self.needs_patch_scale and self.global_step == 0:
                    self._set_patch_scale(patches, rows)
                errors, units, _ = self._explain_sums(embeddings, patches, paths, rows)
                loss = loss + (1 - self.alpha) * (errors / units).mean()
        self.log("train/loss", loss, batch_size=len(rows["image"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = complete(batch, self.sources)
        embeddings, patches, paths = embed_as_read(self.target, self.grid, rows["image"])
        logits, wanted = self.target.classify(embeddings), self._target_probabilities(rows)
        self.accuracy.update((logits.argmax(-1) == wanted.argmax(-1)).float())
        with torch.autocast(patches.device.type, enabled=False):
            if self.predictions == "embedding":
                self.predict_loss.update(embeddings, rows["embedding"])
            else:
                loss = self._predict_loss(logits, wanted, embeddings, rows)
                self.predict_loss.update(loss * len(logits), len(logits))
            if self.labels is None:
                return
            errors, units, attributions = self._explain_sums(embeddings, patches, paths, rows)
        self.explain_loss.update(errors, units)
        if attributions is not None:
            self.rank_correlation.update(attributions, rows["shapley"])

    def on_validation_epoch_end(self) -> None:
        """Log the loss and the metrics of all images."""
        loss = self.alpha * self.predict_loss.compute()
        if self.labels is not None:
            loss = loss + (1 - self.alpha) * self.explain_loss.compute()
        values = {"val/loss": loss, "val/accuracy": self.accuracy.compute()}
        if self.labels is not None and not self.learns_vectors:
            values["val/rank_correlation"] = self.rank_correlation.compute()
        for metric in (self.predict_loss, self.explain_loss, self.accuracy, self.rank_correlation):
            metric.reset()
        self.log_dict(values, prog_bar=True, sync_dist=True)  # equal in all processes, but Lightning would warn

    def _predict_loss(self, logits: Tensor, wanted: Tensor, embeddings: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """L_predict; its divergence from labels, which are 0 and 1, is the cross entropy."""
        if self.predictions == "embedding":
            return relative_error(embeddings.float(), rows["embedding"].float())
        return F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")

    def _explain_sums(
        self, embeddings: Tensor, patches: Tensor, paths: Tensor | None, rows: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | int, Tensor | None]:
        """Numerators and denominators of L_explain, and the attributions that `shapley` labels; `None` without."""
        if self.learns_vectors:
            return *self.labels.loss_sums(self.target.head.vectors(patches, paths), rows), None
        attributions = select_explained(self.target.head.attributions(patches, embeddings.float(), paths), rows)
        return (attributions - rows["shapley"]).square().sum(), attributions.numel(), attributions

    def _target_probabilities(self, rows: dict[str, Tensor]) -> Tensor:
        """The probabilities to predict, (B, K): 1 for the label, or the teacher's probabilities."""
        if self.predictions != "labels":
            return self.teacher.classify(rows["embedding"]).softmax(-1)
        check_labels(rows["label"], self.target.num_classes, "projection= for their classes", "projection")
        return F.one_hot(rows["label"], self.target.num_classes).float()

    @torch.no_grad()
    def _set_patch_scale(self, patches: Tensor, rows: dict[str, Tensor]) -> None:
        """Multiply `patch_scale` so that the vectors c_z, which may be 100 times too large, have the labels' size."""
        self.needs_patch_scale = False
        factor = self.labels.unit(rows) / self.target.head.vectors(patches).std()
        self.target.head.patch_scale *= gather_processes(factor).mean()

    def provenance(self) -> Identity:
        """Describe the model, for the header of its file."""
        return {
            "class": "SelfExplaining",
            "grid": {"image_size": self.grid.image_size, "patch_size": self.grid.patch_size},
            "model": self.target.timm_name,
            "target": self.target.identity(),
            "classes": self.target.classes,
            "base_sha256": self.base_hash,
            "alpha": self.alpha,
            "head": {name: getattr(self.target.head, name) for name in ("normalise", "reading", "blocks")},
        }

    def export(self, folder: Path) -> Path:
        """Write the backbone and the head with their `provenance` to `model.safetensors`."""
        return save_weights(self.target.state_dict(), folder / "model.safetensors", self.provenance())
