"""The sweep of λ₁, λ₂ and ratios: its points, their metrics, the best one, and reports."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError, check_distinct, checks_choices
from explainers.metrics.agreement import Agreement, BestFactor, agreement_metrics
from explainers.metrics.means import Accuracy, Mean
from explainers.models import TargetModel
from explainers.saved.weights import is_finite

Point = tuple[float, ...]
"""(λ₁, λ₂); of a sum of several vectors also the ratio of each."""

FLATTEST = 1e-6

Row = dict[str, float]
"""What is measured at a point, after the numbers of the point."""


def sweep_points(
    lambda_1: Sequence[float],
    lambda_2: Sequence[float],
    ratios: Sequence[Sequence[float]] | None = None,
    sources: int = 1,
) -> list[Point]:
    """All combinations of λ₁, λ₂ and ratios, after the unchanged model, λ₁ = 1 and λ₂ = 0.

    Without a vector, λ₂ = 0, ratios have no effect, and only the first ones are listed.

    >>> sweep_points([1.0], [0.0, 0.5])
    [(1.0, 0.0), (1.0, 0.5)]
    >>> sweep_points([1.0], [0.5], ratios=[[1.0, 1.0], [1.0, 0.2]], sources=2)
    [(1.0, 0.0, 1.0, 1.0), (1.0, 0.5, 1.0, 1.0), (1.0, 0.5, 1.0, 0.2)]

    Args:
        lambda_1: values of λ₁.
        lambda_2: values of λ₂.
        ratios: ratios of the vectors; `None`: all are 1. A single vector has none.
        sources: number of vectors.

    Raises:
        InputError: for an empty list, a value that is given twice, or ratios that are not one for each source.
    """
    if not lambda_1 or not lambda_2 or not all(map(is_finite, [*lambda_1, *lambda_2])):
        got = f"lambda_1={lambda_1}, lambda_2={lambda_2}"
        raise InputError(f"expected finite numbers, got {got}", "lambda_1", "lambda_2")
    count = sources if sources > 1 else 0
    each = [(1.0,) * count] if ratios is None else [tuple(ratio) for ratio in ratios]
    if not each or any(len(ratio) != count for ratio in each):
        raise InputError(
            f"expected lists of {sources} numbers, one for each source, or None for a single one, got ratios={ratios}",
            "ratios",
        )
    check_distinct(lambda_1=lambda_1, lambda_2=lambda_2, ratios=each)
    unchanged = (1.0, 0.0, *each[0])
    points = [(one, two, *ratio) for one, two, ratio in product(lambda_1, lambda_2, each) if two or ratio == each[0]]
    return [unchanged, *(point for point in points if point != unchanged)]


def name_numbers(point: Point) -> Row:
    """Name of each number of a point → number.

    >>> name_numbers((1.0, 0.5, 1.0, 0.2))
    {'lambda_1': 1.0, 'lambda_2': 0.5, 'ratio_1': 1.0, 'ratio_2': 0.2}
    """
    names = ["lambda_1", "lambda_2", *(f"ratio_{number + 1}" for number in range(len(point) - 2))]
    return dict(zip(names, point, strict=True))


def read_point(row: Row) -> Point:
    """The point of a row, see `name_numbers`."""
    return tuple(value for name, value in row.items() if name.startswith(("lambda_", "ratio_")))


class PointMetrics(nn.Module):
    """Metrics of the model at one point: its accuracy, what it keeps of the unchanged model's predictions, agreement of
    its attributions with a reference, and their best factor.

    `kept` is the share of images with the same predicted class, `divergence` is KL(unchanged ‖ model).

    Args:
        k: K of IoU@K.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.accuracy = Accuracy()
        self.kept = Accuracy()
        self.divergence = Mean()
        self.agreement = nn.ModuleDict(agreement_metrics(k))
        self.best_factor = BestFactor()

    def update(self, logits: Tensor, unchanged: Tensor, attributions: Tensor, rows: dict[str, Tensor]) -> None:
        """Add a batch.

        Args:
            logits: (B, K).
            unchanged: logits of the unchanged model, (B, K).
            attributions: attributions of the patches to the explained class, (B, N).
            rows: holds `label` (B,), −1 if it is unknown, and the reference attributions, `shapley` (B, N).
        """
        self.accuracy.update(logits.argmax(-1), rows["label"])
        self.kept.update(logits.argmax(-1), unchanged.argmax(-1))
        before, after = (each.double().log_softmax(-1) for each in (unchanged, logits))
        self.divergence.update(F.kl_div(after, before, reduction="none", log_target=True).sum(-1))
        for metric in (*self.agreement.values(), self.best_factor):
            metric.update(attributions, rows["shapley"])  # type: ignore[operator]

    def result(self) -> tuple[Row, float]:
        """Compute the metrics and the best factor over the images of all processes, and reset them."""
        own = {name: getattr(self, name) for name in ("accuracy", "kept", "divergence")}
        metrics: dict[str, Any] = {**own, **self.agreement}
        values = {name: metric.compute().item() for name, metric in metrics.items()}
        factor = self.best_factor.compute().item()
        for metric in (*metrics.values(), self.best_factor):
            metric.reset()
        return values, factor


@checks_choices
def best_point(sweep: Sequence[Row], tolerance: float, select: Agreement, unchanged: bool = True) -> Row:
    """The row with the best metric among the rows that lose at most `tolerance` of the first row's accuracy.

    Without labels, there is no accuracy, and the share of predictions that are `kept` takes its place.

    Args:
        sweep: the rows; the first one is of the unchanged model. Of equal rows, the earlier one is the best.
        tolerance: maximum accuracy drop, as a fraction.
        select: the metric.
        unchanged: whether the first row may be the best. It is anyway if all others lose too much.

    >>> rows = [{"accuracy": 0.9, "iou": 0.1}, {"accuracy": 0.89, "iou": 0.2}, {"accuracy": 0.6, "iou": 0.4}]
    >>> best_point(rows, tolerance=0.02, select="iou")
    {'accuracy': 0.89, 'iou': 0.2}
    """
    accuracy = _name_accuracy(sweep)
    lowest = sweep[0][accuracy] - tolerance - 1e-6  # for the rounding of float32 accuracies
    sign = 1 if agreement_metrics(k=1)[select].higher_is_better else -1
    allowed = [row for row in sweep if row[accuracy] >= lowest]
    candidates = allowed if unchanged else allowed[1:] or allowed
    return max(candidates, key=lambda row: -math.inf if math.isnan(row[select]) else sign * row[select])


def _name_accuracy(sweep: Sequence[Row]) -> str:
    return "kept" if math.isnan(sweep[0]["accuracy"]) else "accuracy"


def curvature(sweep: Sequence[Row]) -> float:
    """How sharply the divergence of the predictions rises along the vector: τᵀ F τ, F the information of Fisher.

    F is the Hessian of the divergence at the unchanged model. So KL(unchanged ‖ λ₂) ≈ λ₂² τᵀ F τ / 2 for small λ₂; it
    is read at the smallest one of the sweep. NaN if λ₂ = 0 is the only one.

    >>> curvature([{"lambda_1": 1.0, "lambda_2": value, "divergence": 3 * value**2} for value in (0.0, 0.5, 1.0)])
    6.0
    """
    moved = [row for row in sweep if row["lambda_1"] == 1 and row["lambda_2"] != 0]
    if not moved:
        return math.nan
    nearest = min(moved, key=lambda row: abs(row["lambda_2"]))
    return 2 * nearest["divergence"] / nearest["lambda_2"] ** 2


def summary(sweep: Sequence[Row], best: Row, select: str) -> str:
    """One line: the selected point, and how it changes the accuracy and the metric that selected it.

    >>> rows = [{"lambda_1": 1.0, "lambda_2": value, "accuracy": 0.9, "iou": value} for value in (0.0, 0.5)]
    >>> summary(rows, rows[1], "iou")
    'best of 2 points: λ₁ = 1, λ₂ = 0.5; accuracy 0.9 → 0.9, iou 0 → 0.5'
    """
    changes = (f"{name} {sweep[0][name]:.3g} → {best[name]:.3g}" for name in (_name_accuracy(sweep), select))
    one, two, *ratios = read_point(best)
    point = f"λ₁ = {one:g}, λ₂ = {two:g}"
    if ratios:
        point += f", ratios {' : '.join(f'{ratio:g}' for ratio in ratios)}"
    return f"best of {len(sweep)} points: {point}; {', '.join(changes)}"


def report(trainer: Trainer, sweep: Sequence[Row], best: Row, select: str) -> None:
    """Log all points, with the curvature at each and which one is chosen, and print the summary.

    W&B gets them as the table `sweep/points` and the figure `sweep/curves`, other loggers as a row of metrics for each.
    """
    rows = [row | {"curvature": curvature([row]), "chosen": float(row is best)} for row in sweep]
    rows.sort(key=lambda row: (row["lambda_1"], *read_point(row)[2:], row["lambda_2"]))
    line = summary(sweep, best, select)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            from explainers.report.lambda_figure import lambda_curves  # imports Matplotlib, which takes long

            cells = [[None if math.isnan(value) else value for value in row.values()] for row in rows]
            data = [[*values, bool(chosen)] for *values, chosen in cells]
            logger.log_table("sweep/points", columns=[*rows[0]], data=data)
            logger.log_image("sweep/curves", [lambda_curves({"points of the sweep": rows}, line)])
        else:
            for step, row in enumerate(rows):
                logger.log_metrics({f"sweep/{name}": value for name, value in row.items()}, step)
    if trainer.is_global_zero:
        print(line)


def restoration(changed: Tensor, unchanged: Tensor, ridge: float = 1.0) -> Tensor:
    """Compute the map R, (D, D), with the least Σ |R e − ê|² + k |R − I|², by ridge regression towards the identity.

    A fixed head whose projection is multiplied by R computes logits from restored embeddings. Equal images determine R
    too: at least `FLATTEST` of the mean square counts as variance.

    >>> unchanged = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])
    >>> (restoration(2 * unchanged, unchanged, ridge=0.0) + 0).tolist()
    [[0.5, 0.0], [0.0, 0.5]]

    Args:
        changed: e, the embeddings of images by the model with the vector, (B, D).
        unchanged: ê, their embeddings by the model without it, (B, D).
        ridge: k, as a multiple of the mean variance Σ |e − mean e|² / D.
    """
    e = changed.double()
    spread = (e - e.mean(0)).square().sum().clamp(min=FLATTEST * e.square().sum())
    strength = ridge * spread / e.shape[1]
    identity = torch.eye(e.shape[1], dtype=e.dtype, device=e.device)
    change = torch.linalg.solve(e.mT @ e + strength * identity, e.mT @ (unchanged.double() - e)).mT
    return (identity + change).to(changed.dtype)


def restore_projection(projection: Tensor | None, restoration: Tensor | None) -> Tensor | None:
    """The projection P of a fixed head, `None` for none, for embeddings that are restored first: P R."""
    if restoration is None:
        return projection
    return restoration if projection is None else projection @ restoration


@torch.no_grad()
def restorations(
    points: Sequence[Any], load: Callable[[Any], TargetModel], batches: Iterable[dict[str, Tensor]]
) -> dict[Any, Tensor]:
    """Fit a `restoration` for every point of a sweep but the first, the unchanged model: point → R.

    Args:
        points: the points, or their names.
        load: loads the weights of a point into a model, and returns it.
        batches: batches of images, without labels, see `some_images`.
    """
    embeddings: list[list[Tensor]] = [[] for _ in points]
    for batch in batches:
        for point, of_point in zip(points, embeddings, strict=True):
            target = load(point)
            of_point.append(target.embed(target.normalise(batch["image"].to(target.mean.device))).float())
    unchanged, *changed = (torch.cat(of_point) for of_point in embeddings)
    return {point: restoration(each, unchanged) for point, each in zip(points[1:], changed, strict=True)}
