"""Makes a prediction-only model self-explaining without training (Yoshikawa et al., 2025)."""

import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

from lightning import LightningModule
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor, nn

from explainers.errors import InputError, check_distinct, check_range, checks_choices
from explainers.masking import PatchGrid
from explainers.metrics.accuracy import Accuracy
from explainers.metrics.agreement import Agreement, BestFactor, agreement_metrics
from explainers.saved.files import write_atomically
from explainers.saved.identity import Identity, weights_hash
from explainers.saved.records import first_difference
from explainers.saved.weights import read_weights, save_weights
from explainers.share import Loadable
from explainers.target import TargetModel
from explainers.training.sources import Pixels, complete
from explainers.training.state_dicts import State, part
from explainers.vectors.exported import exported_target
from explainers.vectors.lambda_sweep import Point, best_point, table
from explainers.vectors.patches import explained
from explainers.vectors.self_explaining import LabelBuilder, SelfExplaining
from explainers.vectors.task_arithmetic import cosine, transfer, vector

log = logging.getLogger(__name__)

TRANSFERRED = "transferred"
"""Value of `alpha` in the file of a model that was made by arithmetic instead of training."""


class ExplainabilityVector(LightningModule, Loadable):
    """Adds the explainability vector of a source task to a model of a target task, and selects λ₁ and λ₂.

    Validation measures every pair of λ₁ and λ₂ in one pass over the images. Of the pairs whose accuracy is at most
    `tolerance` below that of the unchanged model, λ₁ = 1 and λ₂ = 0, it selects the one with the best attributions.
    `export` writes the selected model. Testing measures the selected model and the unchanged one on images that the
    selection has not used.

    Args:
        target: the base model θ_base, from which all others were fine-tuned.
        grid: the patches that are explained.
        predicting: file (see `SelfExplaining.export`) of the source task's model θ_ft, trained without attributions;
            `None` if this is the base model itself, with its own head.
        explaining: file of the source task's model θ_ft*, trained with attributions; the vector is τ = θ_ft* − θ_ft.
            The transferred model reads its patches as this model does.
        onto: file of the target task's prediction-only model.
        lambda_1: values of λ₁ to try.
        lambda_2: values of λ₂ to try.
        labels: builds the source of the reference attributions from the model of `onto` and the grid.
        tolerance: maximum accuracy drop, as a fraction.
        select: metric that selects λ₁ and λ₂.
        k: K of IoU@K.
        calibrate: give the selected model's attributions their best factor on the validation images, for a source whose
            teacher computes attributions in other units than `labels`.
        hurtful_cosine: warn if the cosine of the source's and the target's task vectors is below this value. Without
            `predicting` there is no task vector of the source, and no cosine.
    """

    loaded_as = SelfExplaining

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        predicting: str | None,
        explaining: str,
        onto: str,
        lambda_1: Sequence[float],
        lambda_2: Sequence[float],
        labels: LabelBuilder,
        tolerance: float = 0.02,
        select: Agreement = "e_rmse",
        k: int = 10,
        calibrate: bool = False,
        hurtful_cosine: float = 0.0,
    ) -> None:
        super().__init__()
        if not lambda_1 or not lambda_2:
            raise InputError(f"expected values of explainer.lambda_1 and lambda_2, got {lambda_1} and {lambda_2}")
        check_distinct(lambda_1=lambda_1, lambda_2=lambda_2)
        check_range(0, tolerance=tolerance)
        check_range(-1, 1, hurtful_cosine=hurtful_cosine)
        check_range(1, grid.num_patches, k=k)
        if calibrate and select not in ("iou", "rank_correlation"):
            raise InputError(
                f"expected explainer.select=rank_correlation or iou with explainer.calibrate, because the errors of the"
                f" sweep are those without a factor, got {select}"
            )
        self.tolerance, self.select, self.calibrate, self.hurtful_cosine = tolerance, select, calibrate, hurtful_cosine
        self.base = target.backbone.state_dict()
        self.parents: dict[str, str] = {"base": weights_hash(target.backbone)}
        self.heads: dict[str, Identity] = {}
        before = self.base if predicting is None else self._read("predicting", predicting, target)
        after, self.onto = self._read("explaining", explaining, target), self._read("onto", onto, target)
        if predicting is not None:
            self._check_heads(predicting, explaining)
        self.vector = vector(after, before)
        self.cosine = None if predicting is None else cosine(vector(before, self.base), vector(self.onto, self.base))
        self.model = SelfExplaining(target, grid, alpha=1, weights=onto).requires_grad_(False)
        self.model.target.head.read_as(exported_target(target, explaining).head)
        self.patch_scale = self.model.target.head.patch_scale.item()
        self.teacher = exported_target(target, onto).requires_grad_(False)
        reference = labels(self.teacher, grid)
        if reference.classes == "all":
            raise InputError("expected attributions of one class to compare with, got labels.classes=all; take label")
        self.sources = (Pixels(), reference)
        untouched = (1.0, 0.0)
        self.points = [untouched, *(point for point in product(lambda_1, lambda_2) if point != untouched)]
        self.best = untouched
        metrics_of_points = ({"accuracy": Accuracy(), **agreement_metrics(k)} for _ in self.points)
        self.metrics = nn.ModuleList(nn.ModuleDict(metrics) for metrics in metrics_of_points)
        self.best_factors = nn.ModuleList(BestFactor() for _ in self.points)
        self.factors = dict.fromkeys(self.points, 1.0)
        self.sweep: list[dict[str, float]] = []

    def _read(self, role: Literal["predicting", "explaining", "onto"], path: str, target: TargetModel) -> State:
        """Read the backbone from a file, and check that the model was trained as its role requires."""
        identity, weights = read_weights(path)
        model = identity.get("target", {})
        if model.get("backbone") != target.name:
            raise InputError(f"expected a {target.name} for explainer.{role}, got {model.get('backbone')} in {path}")
        if identity.get("alpha") == TRANSFERRED:
            raise InputError(f"expected for explainer.{role} a model that was trained, got a transferred one in {path}")
        explains = float(identity.get("alpha", 1)) < 1
        if explains != (role == "explaining"):
            raise InputError(
                f"expected for explainer.{role} a model trained {'with' if role == 'explaining' else 'without'}"
                f" attributions, got alpha={identity.get('alpha')} in {path}: are predicting and explaining swapped?"
            )
        if identity.get("base_sha256") != self.parents["base"]:
            raise InputError(
                f"expected for explainer.{role} a model fine-tuned from the base model (SHA-256 "
                f"{self.parents['base'][:12]}), got one from another ({identity.get('base_sha256', '')[:12]}) in {path}"
            )
        self.parents[role] = model["backbone_sha256"]
        self.heads[role] = {key: model[key] for key in target.head_identity()} | {"classes": identity["classes"]}
        return part(weights, "backbone")

    def _check_heads(self, predicting: str, explaining: str) -> None:
        """Compare the heads of the source task's models: between two tasks, the difference is no explanation."""
        difference = first_difference(self.heads["predicting"], self.heads["explaining"])
        if difference is not None:
            raise InputError(
                f"expected predicting and explaining models of one task with one head, got a difference in {difference}"
                f" between {predicting} and {explaining}: train the explaining one from the predicting one's head"
            )

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain with the model of the best point, see `SelfExplaining.forward`."""
        self._load_point(self.best, self.calibrate)
        return self.model(images, classes)

    def _load_point(self, point: Point, calibrate: bool = False) -> None:
        """Load the weights of a point into the model, and the scale of its attributions."""
        for name in ("base", "onto", "vector"):  # moved to the device in the first call
            setattr(self, name, {key: value.to(self.device) for key, value in getattr(self, name).items()})
        self.model.target.backbone.load_state_dict(transfer(self.base, self.onto, self.vector, *point))
        self.model.target.head.patch_scale.fill_(self.patch_scale * (self.factors[point] if calibrate else 1))

    def _measure(self, batch: dict[str, Tensor], points: Sequence[Point], calibrate: bool = False) -> None:
        """Update the metrics of some points; `calibrate` is for all but the unchanged model."""
        rows = complete(batch, self.sources)
        for point in points:
            self._load_point(point, calibrate and point != self.points[0])
            logits, attributions = self.model.look(rows["image"])
            phi = explained(attributions, rows)
            metrics: Any = self.metrics[self.points.index(point)]
            metrics["accuracy"].update(logits.argmax(-1), rows["label"])
            for name in metrics.keys() - {"accuracy"}:
                metrics[name].update(phi, rows["shapley"])
            factor: Any = self.best_factors[self.points.index(point)]
            factor.update(phi, rows["shapley"])

    def _found(self, point: Point) -> dict[str, float]:
        """Compute the metrics of a point and reset them, so that the test starts from zero."""
        metrics: Any = self.metrics[self.points.index(point)]
        values = {name: metric.compute().item() for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        return values

    def on_validation_epoch_start(self) -> None:
        """Forget the images of a test, which must not choose the factors."""
        for factor in self.best_factors:
            factor.reset()  # type: ignore[operator]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._measure(batch, self.points)

    def on_validation_epoch_end(self) -> None:
        """Select the best point, and log the metrics of all points."""
        factors: Any = self.best_factors
        self.factors = {point: factor.compute().item() for point, factor in zip(self.points, factors, strict=True)}
        self.sweep = [{"lambda_1": a, "lambda_2": b} | self._found((a, b)) for a, b in self.points]
        best = best_point(self.sweep, self.tolerance, self.select)
        self.best = (best["lambda_1"], best["lambda_2"])
        known = {} if self.cosine is None else {"cosine": self.cosine}
        self.log_dict({f"val/{name}": value for name, value in (best | known).items()})
        if self.cosine is not None and self.cosine < self.hurtful_cosine:
            log.warning(
                f"the task vectors of source and target point apart (cosine {self.cosine:.2f}, below "
                f"{self.hurtful_cosine:g}): the transfer may hurt; a source that is more like the target is safer"
            )
        for logger in self.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.define_metric("sweep/*", step_metric="sweep/lambda_2")
            for step, row in enumerate(sorted(self.sweep, key=lambda row: (row["lambda_1"], row["lambda_2"]))):
                logger.log_metrics({f"sweep/{name}": value for name, value in row.items()}, step)
        if self.trainer.is_global_zero:
            chosen = f"best of {len(self.points)} points: λ₁ = {self.best[0]:g}, λ₂ = {self.best[1]:g}"
            changes = (f"{name} {self.sweep[0][name]:.3g} → {best[name]:.3g}" for name in ("accuracy", self.select))
            print(f"{chosen}; {', '.join(changes)}")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._measure(batch, list(dict.fromkeys([self.points[0], self.best])), self.calibrate)

    def on_test_epoch_end(self) -> None:
        models = {"untouched": self._found(self.points[0])}
        models["transferred"] = self._found(self.best) if self.best != self.points[0] else models["untouched"]
        self.log_dict({f"test/{model}/{name}": value for model, row in models.items() for name, value in row.items()})

    def provenance(self) -> Identity:
        """The hashes of the models that the transferred model was computed from, with λ₁ and λ₂."""
        self._load_point(self.best, self.calibrate)
        own = self.model.provenance() | {"alpha": TRANSFERRED}
        hashes = {f"{role}_sha256": value for role, value in self.parents.items()}
        return own | hashes | {"lambda_1": self.best[0], "lambda_2": self.best[1]}

    def export(self, folder: Path) -> Path:
        """Write the transferred model to `model.safetensors`, the vector and the table of the sweep beside it.

        `scaled.safetensors` is the unchanged model whose attributions have their best factor on the validation images:
        what a transfer must surpass.
        """
        identity = self.provenance()
        if self.sweep:
            self._load_point(self.points[0], calibrate=True)
            save_weights(self.model.target.state_dict(), folder / "scaled.safetensors", self.model.provenance())
            self._load_point(self.best, self.calibrate)
        write_atomically(folder / "sweep.md", f"{table(self.sweep, self.best)}\n" if self.sweep else "")
        save_weights(self.vector, folder / "vector.safetensors", {"backbone": self.model.target.name} | self.parents)
        return save_weights(self.model.target.state_dict(), folder / "model.safetensors", identity)
