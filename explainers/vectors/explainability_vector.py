"""Makes a prediction-only model self-explaining without training (Yoshikawa et al., 2025)."""

import copy
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from explainers.errors import InputError, check_range, checks_choices
from explainers.learned.sources import Pixels, complete
from explainers.masking import PatchGrid
from explainers.metrics.agreement import Agreement
from explainers.models import TargetModel
from explainers.saved.identity import weights_hash
from explainers.saved.weights import save_weights
from explainers.vectors.lambda_sweep import (
    UNCHANGED,
    LambdaSweep,
    Point,
    Row,
    best_row,
    curvature,
    loss_of,
    summary,
    sweep_points,
)
from explainers.vectors.model_files import TRANSFERRED
from explainers.vectors.projections import some_images
from explainers.vectors.self_explaining import LabelBuilder, SelfExplaining
from explainers.vectors.vector_files import VectorSources, build_vector, read_parent

log = logging.getLogger(__name__)


class Selection:
    """How a sweep selects λ₂, see `best_row`.

    Args:
        metric: the metric that is best.
        tolerance: maximum accuracy drop, as a fraction. Without labels, the maximum share of changed predictions.
        k: K of IoU@K.
    """

    @checks_choices
    def __init__(self, metric: Agreement = "e_rmse", tolerance: float = 0.02, k: int = 10) -> None:
        check_range(0, tolerance=tolerance)
        self.metric: Agreement = metric
        self.tolerance = tolerance
        self.k = k


class ExplainabilityVector(LightningModule):
    """Adds an explainability vector to a model of a target task, and sweeps the vector's weight λ₂.

    The transferred model has the weights θ_base + λ₁ (θ_onto − θ_base) + λ₂ Σ_m r_m τ_m. Nothing is trained: a
    validation measures the models of all λ₂ in one pass over the images, whose labels are computed once, and selects
    one of them. A test measures this model and the unchanged one, λ₁ = 1 and λ₂ = 0, on images that the selection has
    not used. `export` writes the model.

    Args:
        target: the base model θ_base, from which all others were fine-tuned.
        grid: the patches that are explained.
        onto: file (see `SelfExplaining.export`) of the target task's prediction-only model, θ_onto.
        vector: the files of the vectors τ_m of one or several source tasks, and their ratios r_m.
        labels: builds the source of the reference attributions from the model of `onto` and the grid: `ShapleyLabels`,
            or `MethodLabels`, which need neither labels nor masked images.
        lambda_2: values of λ₂ to try, or a single one. Without 0 among them, the unchanged model, of λ₁ = 1, is the
            best one only if all others lose too much accuracy.
        selection: how λ₂ is selected.
        lambda_1: λ₁, the weight of the target task.
        restore: number of training images, without labels, to which the projection of the head is fitted, so that
            predictions stay those of the model of `onto`, see `restoration`; 0 leaves the head as it is, as the paper.
    """

    signed = True

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        onto: str,
        vector: VectorSources,
        labels: LabelBuilder,
        lambda_2: Sequence[float] | float,
        selection: Selection,
        lambda_1: float = 1.0,
        restore: int = 0,
    ) -> None:
        super().__init__()
        check_range(0, restore=restore)
        check_range(1, grid.num_patches, k=selection.k)
        values = lambda_2 if isinstance(lambda_2, Sequence) else [lambda_2]
        points = sweep_points(lambda_1, values)
        parent = read_parent("onto", onto, target)
        self.vector = build_vector(vector, target, parent.backbone)
        self.hashes = {"base": weights_hash(target.backbone), "onto": parent.identity["target"]["backbone_sha256"]}
        explainer = SelfExplaining(target, grid, onto)
        self.teacher = copy.deepcopy(explainer.target).requires_grad_(False)  # before its head reads as the source's
        explainer.target.head = explainer.target.head.read_as(**self.vector.reading)
        self.sweep = LambdaSweep(explainer, target.backbone.state_dict(), self.vector.tau, points, selection.k)
        reference = labels(self.teacher, grid)
        if reference.classes == "all":
            raise InputError("expected attributions of one class to compare with, got labels.classes=all; take label")
        self.sources = (Pixels(), reference)
        self.selection = selection
        self.restore = restore
        self.keeps_unchanged = 0 in values
        self.rows: list[Row] = []
        self.best = UNCHANGED

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain with the selected model, see `SelfExplaining.forward`."""
        return self.sweep.load(self.best)(images, classes)

    def on_validation_start(self) -> None:
        """Fit the projections of all models but the unchanged one."""
        if self.restore:
            data = getattr(self.trainer, "datamodule")  # noqa: B009, Lightning does not declare it
            self.sweep.fit_restorations(some_images(data, "train", self.restore))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.sweep.update(complete(batch, self.sources))

    def on_validation_epoch_end(self) -> None:
        """Select λ₂, log the metrics of all models, and warn of a source that is unlike the target."""
        self.rows = self.sweep.compute()
        best = best_row(self.rows, self.selection.tolerance, self.selection.metric, self.keeps_unchanged)
        self.best = Point(best["lambda_1"], best["lambda_2"])
        numbers = {"loss": loss_of(best, self.selection.metric), "curvature": curvature(self.rows)}
        numbers |= best | self.vector.cosines
        self.log_dict({f"val/{name}": value for name, value in numbers.items()})
        for name, value in self.vector.cosines.items():
            if round(value, 2) < 0 and self.trainer.is_global_zero:
                log.warning(
                    f"the transfer may hurt: the {name} of the source's and the target's task vectors is {value:.2f},"
                    " below 0; take a source that is more like the target"
                )
        report(self.trainer, self.rows, best, self.selection.metric)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.sweep.update(complete(batch, self.sources), list(dict.fromkeys([UNCHANGED, self.best])))

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the unchanged and of the selected model, which may be the same."""
        rows = self.sweep.compute(list(dict.fromkeys([UNCHANGED, self.best])))
        for name, row in (("untouched", rows[0]), ("transferred", rows[-1])):
            self.log_dict({f"test/{name}/{key}": value for key, value in row.items()})
        if self.trainer.is_global_zero:
            print("on test images:", summary([rows[0], rows[-1]], rows[-1], self.selection.metric))

    def export(self, folder: Path) -> Path:
        """Write the transferred model to `model.safetensors`, and the vector, without λ₂, to `vector.safetensors`.

        Their headers have the hashes of the models that they were computed from.

        `scaled.safetensors` is the unchanged model, whose attributions are multiplied by their best factor on the
        validation images: the baseline of a transfer.
        """
        if self.rows:
            unchanged = self.sweep.load(UNCHANGED)
            scaled: Any = copy.deepcopy(unchanged.target)
            scaled.head.scale_attributions(self.rows[0]["best_factor"])
            save_weights(scaled.state_dict(), folder / "scaled.safetensors", unchanged.provenance(1.0))
        hashes = self.hashes | self.vector.hashes
        save_weights(self.vector.tau, folder / "vector.safetensors", {"backbone": self.teacher.name} | hashes)
        own = {"restore": self.restore, **self.best._asdict()}
        own |= {f"{role}_sha256": value for role, value in hashes.items()}
        model = self.sweep.load(self.best)
        identity = model.provenance(TRANSFERRED) | own
        return save_weights(model.target.state_dict(), folder / "model.safetensors", identity)


def report(trainer: Trainer, sweep: Sequence[Row], best: Row, metric: str) -> None:
    """Log all points, with the curvature at each and which one is chosen, and print the summary.

    W&B gets them as the table `sweep/points` and the figure `sweep/curves`, other loggers as a row of metrics for each.
    """
    rows = [row | {"curvature": curvature([row]), "chosen": float(row is best)} for row in sweep]
    rows.sort(key=lambda row: row["lambda_2"])
    line = summary(sweep, best, metric)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            from explainers.report.lambda_figure import lambda_curves  # imports Matplotlib, which takes long

            data = [[None if math.isnan(value) else value for value in row.values()] for row in rows]
            logger.log_table("sweep/points", columns=[*rows[0]], data=data)
            logger.log_image("sweep/curves", [lambda_curves({"points of the sweep": rows}, line)])
        else:
            for step, row in enumerate(rows):
                logger.log_metrics({f"sweep/{name}": value for name, value in row.items()}, step)
    if trainer.is_global_zero:
        print(line)
