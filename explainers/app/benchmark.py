"""Measures explainers on a few images without labels, as an evaluation does: the same sweep, the same metrics."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.evaluation.checks import check_heatmaps
from explainers.evaluation.passes import explain
from explainers.evaluation.summary import Indices, summary
from explainers.evaluation.sweep import Sweep, ranked
from explainers.masking import PatchGrid
from explainers.metrics.cost import Cost, Passes
from explainers.metrics.curves import Curve
from explainers.metrics.perturbation import PerturbationCurves, curve_columns
from explainers.models import TargetModel
from explainers.results.scores import ImageScores
from explainers.runtime.modes import finest_dtype

CURVES: tuple[Curve, ...] = ("fidelity_plus", "fidelity_minus")
LEVELS = 21
"""Number of sparsities, as in `Evaluation`."""

COLUMNS = curve_columns(CURVES) | {"seconds_per_image": "s/image ↓", "forward_passes": Passes.column}
"""Number in results → title of its column."""


@torch.no_grad()
def measure(
    target: TargetModel,
    explainers: Mapping[str, Any],
    batches: Iterable[Tensor],
    grid: PatchGrid | None = None,
    levels: int = LEVELS,
) -> tuple[dict[str, dict[str, Any]], ImageScores]:
    """Measure the fidelity and the cost of explainers, of the class that the target predicts for each image.

    Args:
        target: the model to explain.
        explainers: name → explainer of it.
        batches: images, uint8 (B, C, H, W) each. The first batch is not timed if there are others.
        grid: the patches that are explained; `None` for the model's own.
        levels: number of sparsities, including 0 and 1.

    Returns:
        Explainer → numbers, and the numbers of single images.

    Raises:
        InputError: for a model on a device without float64, and heatmaps that do not fit.
    """
    if finest_dtype(target.mean.device) != torch.float64:
        device = target.mean.device.type
        raise InputError(f"benchmark sums in float64, which {device} does not have: compute on the CPU (--device cpu)")
    grid = target.grid if grid is None else grid
    sweep = Sweep(target, grid, levels=levels)
    metrics: dict[str, Any] = {name: _metrics(grid, levels) for name in explainers}
    indices: Any = Indices()
    for metric in (indices, *(metric for own in metrics.values() for metric in own.values())):
        metric.to(target.mean.device)
        metric.distributed_available_fn = lambda: False  # this process alone measures, in a training of several too
    for number, images in enumerate(batches):
        images = images.to(target.mean.device)
        normalised = target.normalise(images)
        logits = target.classify(target.embed(normalised))
        classes = logits.argmax(-1)
        index = torch.arange(len(indices.rows()), len(indices.rows()) + len(images), device=images.device)
        indices.update(index)
        ends = torch.stack([logits, sweep.empty(normalised).expand_as(logits)], 1)
        for name, explainer in explainers.items():
            explanation, passes, seconds, memory = explain(explainer, target, images, classes)
            check_heatmaps(name, explanation.heatmaps, images, grid)
            unlabelled = torch.full_like(classes, -1)
            outputs = sweep(normalised, ranked(explanation, "patches"), index, classes, unlabelled, ends)
            metrics[name]["curves"].update(outputs)
            metrics[name]["forward_passes"].update(len(images), passes)
            if number == 1:
                metrics[name]["cost"].reset()  # of the first batch, which is slower
            metrics[name]["cost"].update(len(images), seconds, memory)
    results, scores = summary(metrics, indices, explainers)
    return {name: _with_seconds(row) for name, row in results.items()}, scores


def _metrics(grid: PatchGrid, levels: int) -> dict[str, Any]:
    curves = PerturbationCurves(grid.num_patches, CURVES, levels)
    return {"curves": curves, "cost": Cost(), "forward_passes": Passes()}


def _with_seconds(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an explainer, with the seconds for each image in place of the images per second."""
    row = dict(row)
    return row | {"seconds_per_image": 1 / row.pop("images_per_second")}
