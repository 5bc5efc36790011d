"""The figure of a sweep of λ₂."""

from collections.abc import Mapping, Sequence
from math import isnan

from matplotlib.figure import Figure

from explainers.report.labels import choose_colours, legend_below

SIDES = {
    "e_rmse": "E-RMSE  (lower is better)",
    "iou": "IoU@K of the top patches",
    "rank_correlation": "rank correlation ρ",
}


def lambda_curves(
    sweeps: Mapping[str, Sequence[Mapping[str, float]]],
    title: str = "the model with λ₂ times an explainability vector",
) -> Figure:
    """Accuracy and attribution metrics of a model with an explainability vector, against λ₂, with the chosen points.

    Without labels, the share of kept predictions takes the place of the accuracy.

    Args:
        sweeps: label → the points, as `ExplainabilityVector` logs them; several λ₁ have a line each.
        title: text above the panels.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = [*figure.subplots(2, 2, sharex=True).flat]
    colours = choose_colours(sweeps)
    unlabelled = all(isnan(row["accuracy"]) for rows in sweeps.values() for row in rows)
    first = {"kept": "share of kept predictions"} if unlabelled else {"accuracy": "accuracy"}
    for axis, (side, label) in zip(axes, (first | SIDES).items(), strict=True):
        for name, rows in sweeps.items():
            lines: dict[float, list[Mapping[str, float]]] = {}
            for row in sorted(rows, key=lambda row: row["lambda_2"]):
                lines.setdefault(row["lambda_1"], []).append(row)
            for line in lines.values():
                places = [row["lambda_2"] for row in line], [row[side] for row in line]
                axis.plot(*places, marker=".", color=colours[name], label=name)
            for row in (row for row in rows if row["chosen"]):
                axis.plot(row["lambda_2"], row[side], "*", color="black", markersize=12, label="chosen point")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    for axis in axes[-2:]:
        axis.set_xlabel("λ₂, weight of the explainability vector")
    figure.suptitle(title, fontsize=10)
    legend_below(figure, axes)
    return figure
