"""The sweep of λ₂: the models of its points, their metrics, and the best one."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError, check_distinct, checks_choices
from explainers.metrics.agreement import Agreement, BestFactor, agreement_metrics
from explainers.metrics.means import Accuracy, Mean
from explainers.saved.weights import State, is_finite
from explainers.vectors.fixed_head import select_explained
from explainers.vectors.self_explaining import SelfExplaining
from explainers.vectors.task_arithmetic import restoration, transfer


class Point(NamedTuple):
    """A point of a sweep: λ₁ and λ₂."""

    lambda_1: float
    lambda_2: float


UNCHANGED = Point(1.0, 0.0)
"""The point of the model that nothing is added to."""

Row = dict[str, float]
"""What is measured at a point, after `lambda_1` and `lambda_2`."""


def sweep_points(lambda_1: float, lambda_2: Sequence[float]) -> list[Point]:
    """The points of a sweep of λ₂, after the unchanged model; an InputError for a value that is no number, or repeated.

    >>> sweep_points(1.0, [0.0, 0.5])
    [Point(lambda_1=1.0, lambda_2=0.0), Point(lambda_1=1.0, lambda_2=0.5)]
    """
    if not lambda_2 or not all(map(is_finite, [lambda_1, *lambda_2])):
        got = f"lambda_1={lambda_1}, lambda_2={lambda_2}"
        raise InputError(f"expected finite numbers, got {got}", "lambda_1", "lambda_2")
    check_distinct(lambda_2=lambda_2)
    return [UNCHANGED, *(point for value in lambda_2 if (point := Point(lambda_1, value)) != UNCHANGED)]


class PointMetrics(nn.Module):
    """Metrics of the model at one point: its accuracy, what it keeps of the unchanged model's predictions, agreement of
    its attributions with a reference, and the factor that brings them nearest to it.

    `kept` is the share of images with the same predicted class, `divergence` is KL(unchanged ‖ model).

    Args:
        k: K of IoU@K.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.predicting = nn.ModuleDict({"accuracy": Accuracy(), "kept": Accuracy(), "divergence": Mean()})
        self.explaining = nn.ModuleDict({**agreement_metrics(k), "best_factor": BestFactor()})

    def update(self, logits: Tensor, unchanged: Tensor, attributions: Tensor, rows: dict[str, Tensor]) -> None:
        """Add a batch.

        Args:
            logits: (B, K).
            unchanged: logits of the unchanged model, (B, K).
            attributions: attributions of the patches to the explained class, (B, N).
            rows: holds `label` (B,), −1 if it is unknown, and the reference attributions, `shapley` (B, N).
        """
        metrics: Any = self.predicting
        metrics["accuracy"].update(logits.argmax(-1), rows["label"])
        metrics["kept"].update(logits.argmax(-1), unchanged.argmax(-1))
        before, after = (each.double().log_softmax(-1) for each in (unchanged, logits))
        metrics["divergence"].update(F.kl_div(after, before, reduction="none", log_target=True).sum(-1))
        for metric in self.explaining.values():
            metric.update(attributions, rows["shapley"])  # type: ignore[operator]

    def compute(self) -> Row:
        """Compute the metrics over the images of all processes, and reset them."""
        metrics: dict[str, Any] = {**self.predicting, **self.explaining}
        values = {name: metric.compute().item() for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        return values


class LambdaSweep(nn.Module):
    """A self-explaining model that takes the weights of any point, and is measured at each.

    They are θ_base + λ₁ (θ_onto − θ_base) + λ₂ τ.

    Args:
        explainer: the prediction-only model θ_onto, whose head reads patches as the explaining model's; changed in
            place.
        base: θ_base, weights of the base model.
        tau: τ, the vector.
        points: the points; the first is the unchanged model.
        k: K of IoU@K.
    """

    projection: Tensor | None

    def __init__(self, explainer: SelfExplaining, base: State, tau: State, points: Sequence[Point], k: int = 1) -> None:
        super().__init__()
        self.explainer = explainer.eval().requires_grad_(False)
        onto = {name: value.clone() for name, value in explainer.target.backbone.state_dict().items()}
        self.states = base, onto, tau
        self.points = points
        self.metrics: Any = nn.ModuleList(PointMetrics(k) for _ in points)
        self.register_buffer("projection", explainer.target.head.projection, persistent=False)
        self.restorations: dict[Point, Tensor] = {}

    def load(self, point: Point) -> SelfExplaining:
        """Give the model the weights of a point, and its projection: of the head, after its `restoration`."""
        target = self.explainer.target
        device = target.mean.device  # to which the first call moves the weights
        base, onto, tau = ({name: value.to(device) for name, value in state.items()} for state in self.states)
        self.states = base, onto, tau
        target.backbone.load_state_dict(transfer(base, onto, tau, *point))
        restored = self.restorations.get(point)
        if restored is not None and self.projection is not None:
            restored = self.projection @ restored
        target.head.projection = self.projection if restored is None else restored
        return self.explainer

    @torch.no_grad()
    def fit_restorations(self, batches: Iterable[dict[str, Tensor]]) -> None:
        """Fit the `restoration` of every point but the first to images without labels."""
        self.restorations = {}
        embeddings: list[list[Tensor]] = [[] for _ in self.points]
        for batch in batches:
            for point, of_point in zip(self.points, embeddings, strict=True):
                target = self.load(point).target
                of_point.append(target.embed(target.normalise(batch["image"].to(target.mean.device))).float())
        unchanged, *changed = map(torch.cat, embeddings)
        fitted = (restoration(each, unchanged) for each in changed)
        self.restorations = dict(zip(self.points[1:], fitted, strict=True))

    @torch.no_grad()
    def update(self, rows: dict[str, Tensor], points: Sequence[Point] = ()) -> None:
        """Measure a batch at some points, by default at all; the first of them is the unchanged model."""
        unchanged = None
        for point in points or self.points:
            logits, attributions = self.load(point).predict_and_explain(rows["image"])
            unchanged = logits if unchanged is None else unchanged
            metrics = self.metrics[self.points.index(point)]
            metrics.update(logits, unchanged, select_explained(attributions, rows), rows)

    def compute(self, points: Sequence[Point] = ()) -> list[Row]:
        """What was measured at some points, by default at all, over the images since the last call."""
        return [point._asdict() | self.metrics[self.points.index(point)].compute() for point in points or self.points]


def loss_of(row: Row, metric: Agreement) -> float:
    """What a sweep minimises: the metric, or its negative where more of it is better."""
    return -row[metric] if agreement_metrics(k=1)[metric].higher_is_better else row[metric]


@checks_choices
def best_row(sweep: Sequence[Row], tolerance: float, metric: Agreement, unchanged: bool = True) -> Row:
    """The row with the best metric among the rows that lose at most `tolerance` of the first row's accuracy.

    Without labels, there is no accuracy, and the share of predictions that are `kept` takes its place.

    Args:
        sweep: the rows; the first one is of the unchanged model. Of equal rows, the earlier one is the best.
        tolerance: maximum accuracy drop, as a fraction.
        metric: the metric.
        unchanged: whether the first row may be the best. It is anyway if all others lose too much.

    >>> rows = [{"accuracy": 0.9, "iou": 0.1}, {"accuracy": 0.89, "iou": 0.2}, {"accuracy": 0.6, "iou": 0.4}]
    >>> best_row(rows, tolerance=0.02, metric="iou")
    {'accuracy': 0.89, 'iou': 0.2}
    """
    accuracy = _name_accuracy(sweep)
    lowest = sweep[0][accuracy] - tolerance - 1e-6  # for the rounding of float32 accuracies
    allowed = [row for row in sweep if row[accuracy] >= lowest]
    candidates = allowed if unchanged else allowed[1:] or allowed
    return min(candidates, key=lambda row: math.inf if math.isnan(row[metric]) else loss_of(row, metric))


def _name_accuracy(sweep: Sequence[Row]) -> str:
    return "kept" if math.isnan(sweep[0]["accuracy"]) else "accuracy"


def curvature(sweep: Sequence[Row]) -> float:
    """How sharply the divergence of the predictions rises along the vector: τᵀ F τ, F the information of Fisher.

    F is the Hessian of the divergence at the unchanged model. So KL(unchanged ‖ λ₂) ≈ λ₂² τᵀ F τ / 2 for small λ₂; it
    is read at the smallest one of the sweep. NaN without a point of λ₁ = 1 and λ₂ ≠ 0.

    >>> curvature([{"lambda_1": 1.0, "lambda_2": value, "divergence": 3 * value**2} for value in (0.0, 0.5, 1.0)])
    6.0
    """
    moved = [row for row in sweep if row["lambda_1"] == 1 and row["lambda_2"] != 0]
    nearest = min(moved, key=lambda row: abs(row["lambda_2"]), default=None)
    return math.nan if nearest is None else 2 * nearest["divergence"] / nearest["lambda_2"] ** 2


def summary(sweep: Sequence[Row], best: Row, metric: str) -> str:
    """One line: the selected point, and how it changes the accuracy and the metric that selects.

    >>> rows = [{"lambda_1": 1.0, "lambda_2": value, "accuracy": 0.9, "iou": value} for value in (0.0, 0.5)]
    >>> summary(rows, rows[1], "iou")
    'λ₁ = 1, λ₂ = 0.5; accuracy 0.9 → 0.9, iou 0 → 0.5'
    """
    changes = (f"{name} {sweep[0][name]:.3g} → {best[name]:.3g}" for name in (_name_accuracy(sweep), metric))
    point = f"λ₁ = {best['lambda_1']:g}, λ₂ = {best['lambda_2']:g}"
    single = len(sweep) == 2 and best is sweep[1]  # nothing was chosen
    return f"{'' if single else f'best of {len(sweep)} points: '}{point}; {', '.join(changes)}"
