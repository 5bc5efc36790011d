"""Makes a prediction-only model self-explaining without training (Yoshikawa et al., 2025)."""

import copy
import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning import LightningModule
from torch import Tensor, nn

from explainers.errors import InputError, check_range, checks_choices
from explainers.masking import PatchGrid
from explainers.metrics.agreement import Agreement
from explainers.models import TargetModel
from explainers.posthoc import build
from explainers.saved.identity import Identity, recipe
from explainers.saved.weights import save_weights
from explainers.training.sources import Pixels, complete
from explainers.training.state_dicts import State
from explainers.vectors.fixed_head import select_explained
from explainers.vectors.lambda_sweep import (
    Point,
    PointMetrics,
    Row,
    best_point,
    curvature,
    name_numbers,
    read_point,
    report,
    restorations,
    restore_projection,
    sweep_points,
)
from explainers.vectors.model_files import (
    TRANSFERRED,
    compute_vectors,
    exported_target,
    list_sources,
    read_head,
    read_parents,
)
from explainers.vectors.projections import some_images
from explainers.vectors.self_explaining import LabelBuilder, SelfExplaining
from explainers.vectors.task_arithmetic import combine, transfer
from explainers.vectors.vector_files import find_vector, read_vector

log = logging.getLogger(__name__)


class ExplainabilityVector(LightningModule):
    """Adds the explainability vectors of one or several source tasks to a model of a target task.

    The transferred model has the weights θ_base + λ₁ (θ_onto − θ_base) + λ₂ Σ_m r_m τ_m; with one source, λ₂ τ.
    Validation measures every point, a combination of λ₁, λ₂ and ratios r_m, in one pass over the images, whose labels
    are computed once for all points. `best_point` selects one of them, and `export` writes its model. Testing measures
    this model and the unchanged one, λ₁ = 1 and λ₂ = 0, on images that the selection has not used.

    Args:
        target: the base model θ_base, from which all others were fine-tuned.
        grid: the patches that are explained.
        predicting: file (see `SelfExplaining.export`) of the source task's model θ_ft, trained without attributions;
            `None` if this is the base model itself, with its own head. Of several sources: a list.
        explaining: file of the source task's model θ_ft*, trained with attributions; the vector is τ = θ_ft* − θ_ft.
            The transferred model reads its patches as this model does. Of several sources: a list, whose models read
            patches alike; the mean of their factors of attributions is used.
        onto: file of the target task's prediction-only model, θ_onto.
        lambda_1: values of λ₁ to try.
        lambda_2: values of λ₂ to try, or a single one. Without 0 among them, the unchanged model is the best one only
            if all others lose too much accuracy.
        labels: builds the source of the reference attributions from the model of `onto` and the grid: `ShapleyLabels`,
            or `MethodLabels`, which need neither labels nor masked images.
        ratios: ratios of several vectors to try, each with one number per source, such as [[1, 1], [1, 0.5]]. With
            λ₂ = 1, they are the λ₂ of each source. `None`: all ratios are 1.
        tolerance: maximum accuracy drop, as a fraction. Without labels, the maximum share of changed predictions.
        select: metric that selects the point.
        k: K of IoU@K.
        restore: number of training images, without labels, to which the projection of the head is fitted, so that
            predictions stay those of the model of `onto`, see `restoration`; 0 leaves the head as it is, as the paper.
        vector: `shipped`, for the vector that is shipped for the base model, or the file of one, see `save_vector`; it
            takes the place of `predicting` and `explaining`, which have no effect. `None` for the vector of these two.
    """

    signed = True
    projection: Tensor | None

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        predicting: str | Sequence[str | None] | None,
        explaining: str | Sequence[str],
        onto: str,
        lambda_1: Sequence[float],
        lambda_2: Sequence[float] | float,
        labels: LabelBuilder,
        ratios: Sequence[Sequence[float]] | None = None,
        tolerance: float = 0.02,
        select: Agreement = "e_rmse",
        k: int = 10,
        restore: int = 0,
        vector: str | None = None,
    ) -> None:
        super().__init__()
        found = None if vector is None else find_vector(vector, target)
        sources = list_sources(predicting, explaining) if found is None else {}
        values = lambda_2 if isinstance(lambda_2, Sequence) else [lambda_2]
        self.points = sweep_points(lambda_1, values, ratios, len(sources) or 1)
        check_range(0, tolerance=tolerance, restore=restore)
        check_range(1, grid.num_patches, k=k)
        self.keeps_unchanged = 0 in values
        self.tolerance = tolerance
        self.select: Agreement = select
        self.restore = restore

        parents = read_parents(target, sources, onto)
        self.parent_hashes = {role: parent.sha256 for role, parent in parents.items()}
        self.theta_base = parents["base"].weights
        self.theta_onto = parents["onto"].weights
        self.taus, self.cosines = compute_vectors(parents, sources)

        self.model = SelfExplaining(target, grid, alpha=1, weights=onto).eval()
        if found is None:
            reading = read_head([file for _, file in sources.values()], target).describe_reading()
        else:
            file, header = found
            self.taus = [read_vector(file, target)]
            self.parent_hashes["vector"] = hashlib.sha256(file.read_bytes()).hexdigest()
            reading = header["head"]
        self.model.target.head.read_as(reading)
        self.model.requires_grad_(False)
        self.register_buffer("projection", self.model.target.head.projection, persistent=False)
        self.restorations: dict[Point, Tensor] = {}
        self.teacher = exported_target(target, onto).requires_grad_(False)
        reference = labels(self.teacher, grid)
        if reference.classes == "all":
            raise InputError("expected attributions of one class to compare with, got labels.classes=all; take label")
        self.sources = (Pixels(), reference)

        self.metrics = nn.ModuleList(PointMetrics(k) for _ in self.points)
        self.sweep: list[Row] = []
        self.unchanged = self.points[0]
        self.best = self.unchanged
        self.unchanged_factor = 1.0

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain with the model of the selected point, see `SelfExplaining.forward`."""
        self._load(self.best)
        return self.model(images, classes)

    def _load(self, point: Point) -> TargetModel:
        """Load the weights of a point into the model, and its projection."""
        states = (self.theta_base, self.theta_onto, *self.taus)  # moved to the device in the first call
        states = tuple({name: value.to(self.device) for name, value in state.items()} for state in states)
        self.theta_base, self.theta_onto, *self.taus = states
        weights = transfer(self.theta_base, self.theta_onto, self.tau(point), *point[:2])
        self.model.target.backbone.load_state_dict(weights)
        self.model.target.head.projection = restore_projection(self.projection, self.restorations.get(point))
        return self.model.target

    def tau(self, point: Point) -> State:
        """The weighted sum of the vectors at a point, without its λ₂."""
        return combine(self.taus, point[2:] or [1.0])

    def _measure(self, batch: dict[str, Tensor], points: Iterable[Point]) -> None:
        """Update the metrics of some points, the first of which is the unchanged model."""
        rows = complete(batch, self.sources)
        unchanged = None
        for point in points:
            self._load(point)
            logits, attributions = self.model.predict_and_explain(rows["image"])
            unchanged = logits if unchanged is None else unchanged
            self._metrics(point).update(logits, unchanged, select_explained(attributions, rows), rows)

    def _metrics(self, point: Point) -> PointMetrics:
        return cast(PointMetrics, self.metrics[self.points.index(point)])

    def on_validation_start(self) -> None:
        """Fit the projections of all points but the unchanged one."""
        if self.restore:
            data = getattr(self.trainer, "datamodule")  # noqa: B009, Lightning does not declare it
            self.restorations = restorations(self.points, self._load, some_images(data, "train", self.restore))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._measure(batch, self.points)

    def on_validation_epoch_end(self) -> None:
        """Select the best point, log the metrics of all points, and warn of a source that is unlike the target."""
        results = [self._metrics(point).result() for point in self.points]
        self.sweep = [name_numbers(point) | values for point, (values, _) in zip(self.points, results, strict=True)]
        self.unchanged_factor = results[0][1]
        best = best_point(self.sweep, self.tolerance, self.select, self.keeps_unchanged)
        self.best = read_point(best)
        self.log_dict({f"val/{name}": value for name, value in (best | self.cosines).items()})
        self.log("val/curvature", curvature(self.sweep))
        for name, value in self.cosines.items():
            if round(value, 2) < 0 and self.trainer.is_global_zero:
                log.warning(
                    f"the transfer may hurt: the {name} of the source's and the target's task vectors is {value:.2f},"
                    " below 0; take a source that is more like the target"
                )
        report(self.trainer, self.sweep, best, self.select)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._measure(batch, dict.fromkeys([self.unchanged, self.best]))

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the unchanged and of the selected model, which may be the same."""
        both = {"untouched": self.unchanged, "transferred": self.best}
        results = {point: self._metrics(point).result()[0] for point in set(both.values())}
        for model, point in both.items():
            self.log_dict({f"test/{model}/{name}": value for name, value in results[point].items()})

    def provenance(self) -> Identity:
        """Describe the transferred model, with the hashes of the models that it was computed from, and its point."""
        self._load(self.best)
        hashes = {f"{role}_sha256": value for role, value in self.parent_hashes.items()}
        own = {"alpha": TRANSFERRED, "restore": self.restore}
        return self.model.provenance() | own | hashes | name_numbers(self.best)

    def export(self, folder: Path) -> Path:
        """Write the transferred model to `model.safetensors`, and the vector beside it.

        `vector.safetensors` is τ; of several sources, the sum Σ_m r_m τ_m of the selected ratios, without λ₂.
        `scaled.safetensors` is the unchanged model, whose attributions are multiplied by their best factor on the
        validation images: the baseline of a transfer.
        """
        if self.sweep:
            scaled: Any = copy.deepcopy(self._load(self.unchanged))
            scaled.head.scale_attributions(self.unchanged_factor)
            save_weights(scaled.state_dict(), folder / "scaled.safetensors", self.model.provenance())
        ratios = {name: value for name, value in name_numbers(self.best).items() if name.startswith("ratio_")}
        about = {"backbone": self.model.target.name} | self.parent_hashes | ratios
        save_weights(self.tau(self.best), folder / "vector.safetensors", about)
        identity = self.provenance()
        return save_weights(self.model.target.state_dict(), folder / "model.safetensors", identity)


class MethodLabels:
    """A source (see `sources`) of the heatmaps of a method without training, for the predicted class of each image.

    As the reference of a sweep, it needs neither labels nor KernelSHAP. Its rows are those of `ShapleyLabels`:
    `explained` (B,) and `shapley` (B, N), here in the units of the method. They rank the points of a sweep by
    `rank_correlation` or `iou`; errors and factors in these units mean little.

    Args:
        model: the model to explain.
        grid: the patches that are explained.
        method: name of the method, see `posthoc.build`.
    """

    provides = ("explained", "shapley")
    entries = ("image",)
    classes = "predicted"

    def __init__(self, model: TargetModel, grid: PatchGrid, method: str = "DecompX-PLUS") -> None:
        model.check_grid(grid)
        self.model = model
        self.grid = grid
        self.method = method
        self.map: Any = build(method, model, grid)
        self.forward_passes = 1 + getattr(self.map, "forward_passes", 1)

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        with torch.no_grad():
            explained = self.model(batch["image"]).argmax(-1)
        return {"explained": explained, "shapley": self.map(batch["image"], explained).detach().flatten(1)}

    def key(self) -> Identity:
        own = {"source": f"heatmaps by {self.method}", "model": self.model.identity()}
        return recipe(self, without=own) | own
