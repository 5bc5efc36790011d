"""AnyHead: one vector c_z of every patch, whose product with v attributes v · G(x)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from explainers.anyhead.functionals import class_rows, score_functionals
from explainers.anyhead.network import AnyHeadNetwork
from explainers.errors import InputError, check_positive
from explainers.masking import PatchGrid
from explainers.saved.identity import Identity, recipe
from explainers.target import TargetModel
from explainers.target.inputs import check_functionals, checked_classes
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.sources import Features, Source, complete
from explainers.training.training_module import NetworkExplainer, check_backbone

TRAINING = {
    "teacher": "how the weights were found",
    "optimizer": "how the weights were found",
    "scheduler": "how the weights were found",
    "weights": "the start of the training",
    "allow_finetuned_backbone": "allows a difference",
    "min_crop": "augmentation",
    "seed": "draws of the training",
}
"""Arguments of the training, which trained weights do not depend on: they may be used with others."""

READING = {"temperature": "reads another attribution from the same vectors"}
"""Arguments of the heatmap, which is computed from what the network predicts."""


class Teacher(Source, Protocol):
    """A source that knows how well predicted vectors agree with its rows."""

    def loss(self, vectors: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The error of predicted vectors c_z (B, N, D)."""
        ...

    def unit(self, rows: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the entries of c_z, about which a network without training should predict."""
        ...


class AnyHead(NetworkExplainer):
    """Learns to decompose the embedding into vectors c_z of its patches, in one forward pass of the target.

    v · c_z attributes the linear functional v · G(x). So the vectors explain every class of every linear head on the
    backbone, also of heads that did not exist in training. What c_z means is the teacher's choice.

    Args:
        target: the model to explain; it is neither trained nor saved.
        grid: the patches that are explained.
        network: builds the network that predicts c_z, from the target and the grid.
        teacher: builds what is learned from, from the target and the grid; `None` for a module that is not trained.
        optimizer: builds the optimiser from the parameters to train.
        scheduler: builds the schedule from the optimiser and the number of steps.
        weights: file of a trained network (see `export`) to start from.
        allow_finetuned_backbone: accept `weights` that were trained for other weights of the same backbone.
        temperature: T of the score z_y − T log Σ_{k ≠ y} exp(z_k / T) that is explained, for logits z. 1: the log-odds
            of the class; infinity: its logit relative to the mean of the others; `None`: its logit.
        min_crop: area of the smallest random crop of a training image, as a fraction; `None` for whole images.
        seed: seed of the crops.
    """

    networks = (AnyHeadNetwork,)

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        network: Callable[[TargetModel, PatchGrid], Any],
        teacher: Callable[[TargetModel, PatchGrid], Teacher] | None = None,
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
        weights: str | None = None,
        allow_finetuned_backbone: bool = False,
        temperature: float | None = None,
        min_crop: float | None = None,
        seed: int = 0,
    ) -> None:
        if temperature is not None:
            check_positive(temperature=temperature)
        super().__init__(optimizer, scheduler, min_crop, seed, frozen=("target",))
        target.check_grid(grid)
        self.target, self.grid, self.temperature = target.requires_grad_(False).eval(), grid, temperature
        self.network = network(target, grid)
        self.reads = Features(target, self.network.blocks, self.network.direct)
        self.teacher = None if teacher is None else teacher(target, grid)
        self.sources: Sequence[Source] = (self.reads,) if self.teacher is None else (self.teacher, self.reads)
        self.untrained, self.uncalibrated = weights is None, True
        self.allow_finetuned_backbone = allow_finetuned_backbone
        self.val_loss = MeanMetric()
        if weights is not None:
            self.load(weights)

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted ones, in uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        self.grid.check(images)
        rows = self.reads({"image": images})
        logits = self.target.classify(rows["embedding"])
        classes = checked_classes(logits.argmax(-1) if classes is None else classes, images, logits.shape[-1])
        return self._heatmaps(rows, score_functionals(self._head_rows(), logits, self.temperature, classes))

    def explain(self, images: Tensor, functionals: Tensor) -> Tensor:
        """Explain linear functionals v · G(x) of the embedding.

        Args:
            images: uint8, (B, C, H, W).
            functionals: v, (B, D), or (B, V, D) for several of each image.

        Returns:
            (B, P, P) or (B, V, P, P).
        """
        self.grid.check(images)
        check_functionals(functionals, images, self.target.embed_dim)
        return self._heatmaps(self.reads({"image": images}), functionals)

    def all_classes(self, images: Tensor) -> Tensor:
        """Explain every class at once: heatmaps (B, K, P, P)."""
        self.grid.check(images)
        rows = self.reads({"image": images})
        logits = self.target.classify(rows["embedding"])
        return self._heatmaps(rows, score_functionals(self._head_rows(), logits, self.temperature))

    def explain_tasks(self, images: Tensor, heads: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Explain the class that each of T linear classifiers on this backbone predicts, in one pass of the network.

        Args:
            images: uint8 images, (B, C, H, W).
            heads: T classifiers, embeddings (..., D) → logits (..., K); K may differ between them.

        Returns:
            Heatmaps, (B, T, P, P).
        """
        self.grid.check(images)
        rows, functionals = self.reads({"image": images}), []
        with torch.autocast(images.device.type, enabled=False):
            for head in heads:
                logits, of_classes = head(rows["embedding"].float()), class_rows(head, self.target.embed_dim, images)
                functionals.append(score_functionals(of_classes, logits, self.temperature, logits.argmax(-1)))
        return self._heatmaps(rows, torch.stack(functionals, 1))

    def predict(self, rows: dict[str, Tensor]) -> Tensor:
        """Predict c_z of every patch, (B, N, D), from the rows of `reads`."""
        maps = [rows[f"map_{i}"] for i in range(len(self.network.blocks))]
        return self.network(rows["embedding"], maps, rows["direct"] if self.network.direct else None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        teacher = self._teacher()
        rows = complete(self.augmented(batch), self.sources, self.current_epoch)
        if self.uncalibrated and self.global_step == 0:
            self._calibrate(teacher, rows)
        loss = teacher.loss(self.predict(rows), rows)
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = complete(batch, self.sources)
        self.val_loss.update(self._teacher().loss(self.predict(rows), rows), len(batch["index"]))
        self.log("val/loss", self.val_loss, prog_bar=True)

    def identity(self) -> Identity:
        """The backbone, network and grid that the weights of the network were trained for."""
        own = {"target": self.target.backbone_identity(), "network": self.network_recipe()}
        return own | recipe(self, without=(*own, *TRAINING, *READING))

    def check_identity(self, saved: Identity, path: str) -> None:
        """Compare the identity of trained weights with this module's, see `check_backbone`."""
        check_backbone(saved, self.identity(), path, self.allow_finetuned_backbone)

    def _teacher(self) -> Teacher:
        if self.teacher is None:
            raise InputError(
                "expected a teacher to learn from, got none: add teacher@explainer.teacher=coalitions, or propagation"
            )
        return self.teacher

    @torch.no_grad()
    def _calibrate(self, teacher: Teacher, rows: dict[str, Tensor]) -> None:
        """Set the unit of the network's outputs by the first batches of all processes.

        Weights from a file may have learned from a teacher of larger or smaller attributions, and direct paths have a
        size of their own. A squared error of α c_z is quadratic in α, so its values at −1, 0 and 1 give its minimum.
        """
        self.uncalibrated = False
        if self.untrained and not self.network.direct:
            self.network.scale.copy_(self.of_all_processes(teacher.unit(rows)).mean())
            return
        if self.untrained:
            self.network.spread.copy_(self.of_all_processes(rows["direct"].float().sum(1).std()).mean())
        vectors = self.predict(rows)
        factor = self.of_all_processes(teacher.unit(rows) / vectors.std()).mean()
        losses = torch.stack([teacher.loss(sign * factor * vectors, rows) for sign in (-1, 0, 1)])
        minus, none, plus = self.of_all_processes(losses).view(-1, 3).mean(0)
        curvature, descent = minus + plus - 2 * none, minus - plus
        if curvature > 1e-3 * none and descent > 0:  # not for a loss without a size, or an inverted teacher
            self.network.scale *= factor * descent / (2 * curvature)

    def _head_rows(self) -> Tensor:
        return class_rows(self.target.head, self.target.embed_dim, self.target.mean)

    def _heatmaps(self, rows: dict[str, Tensor], functionals: Tensor) -> Tensor:
        """Attributions of v (B, D) or (B, V, D): heatmaps (B, P, P) or (B, V, P, P)."""
        vectors = self.predict(rows).float()
        with torch.autocast(vectors.device.type, enabled=False):
            several = functionals.dim() == 3
            heatmaps = (functionals if several else functionals[:, None]).float() @ vectors.mT  # (B, V, N)
            heatmaps = heatmaps if several else heatmaps[:, 0]
        return heatmaps.unflatten(-1, (self.grid.side, -1))
