"""Checks of the target, the reference and the heatmaps of an evaluation."""

from collections.abc import Collection

from torch import Tensor

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel


def check_target(target: TargetModel, grid: PatchGrid) -> None:
    """Raise an InputError for a grid of another model, or a single class, whose probability is always 1."""
    target.check_grid(grid)
    if target.num_classes < 2:
        raise InputError(
            f"expected a target with 2 classes or more, got {target.num_classes}: the probability of a single class is"
            " always 1; give a head of several classes"
        )


def check_reference(reference: str | None, explainers: Collection[str]) -> None:
    """Raise an InputError unless the explainer to compare with is one of these names, or `None`."""
    if reference is not None and reference not in explainers:
        raise InputError(
            f"expected reference to be one of the explainers {', '.join(explainers)}, got {reference}: add it to them,"
            " or compare with none (evaluation.reference=null)"
        )


def check_heatmaps(explainer: str, heatmaps: Tensor, images: Tensor, grid: PatchGrid) -> None:
    """Raise an InputError that names the explainer unless its heatmaps are finite and have a score for every patch.

    Args:
        explainer: name of the explainer.
        heatmaps: what it returned for the images; (B, P, P) is expected.
        images: (B, C, H, W).
        grid: the patches.
    """
    expected = (len(images), grid.side, grid.side)
    if heatmaps.shape != expected:
        raise InputError(
            f"expected heatmaps of shape {list(expected)} from {explainer}, got {list(heatmaps.shape)}: give it the"
            " grid of the evaluation"
        )
    if not heatmaps.isfinite().all():
        raise InputError(
            f"expected finite heatmaps, got NaN or infinity from {explainer}: leave it out, or compute it in float32"
            " (trainer.precision=32-true)"
        )
