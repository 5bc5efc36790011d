"""A sweep of λ₁ and λ₂: its best point, and its table."""

import math
from collections.abc import Sequence

from explainers.errors import InputError, checks_choices
from explainers.metrics.agreement import Agreement, agreement_metrics

Point = tuple[float, float]
"""(λ₁, λ₂)."""


@checks_choices
def best_point(sweep: Sequence[dict[str, float]], tolerance: float, select: Agreement) -> dict[str, float]:
    """The row with the best metric among those that lose at most `tolerance` of the accuracy of the first row.

    Args:
        sweep: metrics of every point; the first one is the unchanged model. Of equal rows, the earlier one is the best.
        tolerance: maximum accuracy drop, as a fraction.
        select: the metric.

    Raises:
        InputError: if there is no accuracy, because no image has a label.

    >>> rows = [{"accuracy": 0.9, "iou": 0.1}, {"accuracy": 0.89, "iou": 0.2}, {"accuracy": 0.6, "iou": 0.4}]
    >>> best_point(rows, tolerance=0.02, select="iou")
    {'accuracy': 0.89, 'iou': 0.2}
    """
    if math.isnan(sweep[0]["accuracy"]):
        raise InputError("expected images with labels, to measure the accuracy, got none: take labelled images")
    lowest = sweep[0]["accuracy"] - tolerance - 1e-6  # for the rounding of float32 accuracies
    sign = 1 if agreement_metrics(k=1)[select].higher_is_better else -1
    allowed = [row for row in sweep if row["accuracy"] >= lowest]
    return max(allowed, key=lambda row: -math.inf if math.isnan(row[select]) else sign * row[select])


def table(sweep: Sequence[dict[str, float]], best: Point) -> str:
    """The metrics of all points as a Markdown table, in which the best point is marked.

    >>> print(table([{"lambda_1": 1.0, "lambda_2": 0.5, "accuracy": 0.9}], best=(1.0, 0.5)))
    | lambda_1 | lambda_2 | accuracy | |
    | --- | --- | --- | --- |
    | 1.000 | 0.500 | 0.900 | best |
    """
    names = list(sweep[0])
    lines = [f"| {' | '.join(names)} | |", "| --- " * (len(names) + 1) + "|"]
    for row in sorted(sweep, key=lambda row: (row["lambda_1"], row["lambda_2"])):
        mark = "best" if (row["lambda_1"], row["lambda_2"]) == best else ""
        lines.append(f"| {' | '.join(f'{row[name]:.3f}' for name in names)} | {mark} |")
    return "\n".join(lines)
