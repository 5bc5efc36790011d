"""Makes a prediction-only model self-explaining without training (Yoshikawa et al., 2025)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from lightning import LightningModule
from torch import Tensor, nn

from explainers.errors import InputError, check_range, checks_choices
from explainers.masking import PatchGrid
from explainers.metrics.agreement import Agreement
from explainers.saved.files import write_atomically
from explainers.saved.identity import Identity
from explainers.saved.weights import save_weights
from explainers.share import Loadable
from explainers.target import TargetModel
from explainers.training.sources import Pixels, complete
from explainers.vectors.lambda_sweep import (
    UNCHANGED,
    Point,
    PointMetrics,
    best_point,
    report,
    sweep_points,
    table,
    warn_if_hurtful,
)
from explainers.vectors.model_files import TRANSFERRED, exported_target, read_parents
from explainers.vectors.patches import explained
from explainers.vectors.self_explaining import LabelBuilder, SelfExplaining
from explainers.vectors.task_arithmetic import cosine, transfer, vector


class ExplainabilityVector(LightningModule, Loadable):
    """Adds the explainability vector τ of a source task to a model of a target task.

    The transferred model has the weights θ_base + λ₁ (θ_onto − θ_base) + λ₂ τ. Validation measures every pair of λ₁ and
    λ₂ in one pass over the images; `best_point` selects one of them, and `export` writes its model. Testing measures
    this model and the unchanged one, λ₁ = 1 and λ₂ = 0, on images that the selection has not used.

    Args:
        target: the base model θ_base, from which all others were fine-tuned.
        grid: the patches that are explained.
        predicting: file (see `SelfExplaining.export`) of the source task's model θ_ft, trained without attributions;
            `None` if this is the base model itself, with its own head.
        explaining: file of the source task's model θ_ft*, trained with attributions; the vector is τ = θ_ft* − θ_ft.
            The transferred model reads its patches as this model does.
        onto: file of the target task's prediction-only model, θ_onto.
        lambda_1: values of λ₁ to try.
        lambda_2: values of λ₂ to try.
        labels: builds the source of the reference attributions from the model of `onto` and the grid.
        tolerance: maximum accuracy drop, as a fraction.
        select: metric that selects λ₁ and λ₂.
        k: K of IoU@K.
        calibrate: multiply the selected model's attributions by the factor that fits the labels of the validation
            images best, for a source whose teacher computes attributions in other units than `labels`.
        hurtful_cosine: warn if the cosine of the source's and the target's task vectors is below this value. Without
            `predicting`, the source has no task vector, and there is no cosine.
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
        self.points = sweep_points(lambda_1, lambda_2)
        check_range(0, tolerance=tolerance)
        check_range(-1, 1, hurtful_cosine=hurtful_cosine)
        check_range(1, grid.num_patches, k=k)
        if calibrate and select not in ("iou", "rank_correlation"):
            raise InputError(
                "expected explainer.select=rank_correlation or iou with explainer.calibrate, because the sweep measures"
                f" errors without the factor, got {select}"
            )
        self.tolerance = tolerance
        self.select: Agreement = select
        self.calibrate = calibrate
        self.hurtful_cosine = hurtful_cosine

        parents = read_parents(target, predicting, explaining, onto)
        source = parents.get("predicting", parents["base"]).weights
        self.parent_hashes = {role: parent.sha256 for role, parent in parents.items()}
        self.theta_base = parents["base"].weights
        self.theta_onto = parents["onto"].weights
        self.tau = vector(parents["explaining"].weights, source)
        self.cosine = None
        if predicting is not None:
            self.cosine = cosine(vector(source, self.theta_base), vector(self.theta_onto, self.theta_base))

        self.model = SelfExplaining(target, grid, alpha=1, weights=onto).requires_grad_(False)
        explaining_head = exported_target(target, explaining).head
        self.model.target.head.reading = explaining_head.reading
        self.patch_scale = explaining_head.patch_scale.item()
        self.teacher = exported_target(target, onto).requires_grad_(False)
        reference = labels(self.teacher, grid)
        if reference.classes == "all":
            raise InputError("expected attributions of one class to compare with, got labels.classes=all; take label")
        self.sources = (Pixels(), reference)

        self.metrics = nn.ModuleList(PointMetrics(k) for _ in self.points)
        self.factors = dict.fromkeys(self.points, 1.0)
        self.sweep: list[dict[str, float]] = []
        self.best = UNCHANGED

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain with the model of the selected point, see `SelfExplaining.forward`."""
        self._load(self.best, self.calibrate)
        return self.model(images, classes)

    def _load(self, point: Point, calibrate: bool = False) -> None:
        """Load the weights of a point into the model, and the scale of its attributions."""
        for name in ("theta_base", "theta_onto", "tau"):  # moved to the device in the first call
            setattr(self, name, {key: value.to(self.device) for key, value in getattr(self, name).items()})
        self.model.target.backbone.load_state_dict(transfer(self.theta_base, self.theta_onto, self.tau, *point))
        self.model.target.head.patch_scale.fill_(self.patch_scale * (self.factors[point] if calibrate else 1))

    def _measure(self, batch: dict[str, Tensor], points: Iterable[Point], calibrate: bool = False) -> None:
        """Update the metrics of some points; the unchanged model is never calibrated."""
        rows = complete(batch, self.sources)
        for point in points:
            self._load(point, calibrate and point != UNCHANGED)
            logits, attributions = self.model.predict_and_explain(rows["image"])
            self._metrics(point).update(logits, explained(attributions, rows), rows)

    def _metrics(self, point: Point) -> PointMetrics:
        return cast(PointMetrics, self.metrics[self.points.index(point)])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._measure(batch, self.points)

    def on_validation_epoch_end(self) -> None:
        """Select the best point, and log the metrics of all points."""
        self.sweep = []
        for point in self.points:
            values, self.factors[point] = self._metrics(point).result()
            self.sweep.append({"lambda_1": point[0], "lambda_2": point[1]} | values)
        best = best_point(self.sweep, self.tolerance, self.select)
        self.best = (best["lambda_1"], best["lambda_2"])
        self.log_dict({f"val/{name}": value for name, value in best.items()})
        if self.cosine is not None:
            self.log("val/cosine", self.cosine)
            warn_if_hurtful(self.cosine, self.hurtful_cosine)
        report(self.trainer, self.sweep, best, self.select)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._measure(batch, dict.fromkeys([UNCHANGED, self.best]), self.calibrate)

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the unchanged and of the selected model, which may be the same."""
        results = {point: self._metrics(point).result()[0] for point in dict.fromkeys([UNCHANGED, self.best])}
        for model, point in (("untouched", UNCHANGED), ("transferred", self.best)):
            self.log_dict({f"test/{model}/{name}": value for name, value in results[point].items()})

    def provenance(self) -> Identity:
        """Describe the transferred model, with the hashes of the models that it was computed from, λ₁ and λ₂."""
        self._load(self.best, self.calibrate)
        hashes = {f"{role}_sha256": value for role, value in self.parent_hashes.items()}
        point = {"lambda_1": self.best[0], "lambda_2": self.best[1]}
        return self.model.provenance() | {"alpha": TRANSFERRED} | hashes | point

    def export(self, folder: Path) -> Path:
        """Write the transferred model to `model.safetensors`, the vector and the table of the sweep beside it.

        `scaled.safetensors` is the unchanged model, whose attributions are multiplied by their best factor on the
        validation images: the baseline of a transfer.
        """
        if self.sweep:
            self._load(UNCHANGED, calibrate=True)
            save_weights(self.model.target.state_dict(), folder / "scaled.safetensors", self.model.provenance())
        write_atomically(folder / "sweep.md", f"{table(self.sweep, self.best)}\n" if self.sweep else "")
        backbone = {"backbone": self.model.target.name}
        save_weights(self.tau, folder / "vector.safetensors", backbone | self.parent_hashes)
        identity = self.provenance()
        return save_weights(self.model.target.state_dict(), folder / "model.safetensors", identity)
