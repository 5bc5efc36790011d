"""Checks of what a model and an explainer say about images."""

import warnings
from collections.abc import Sequence

from torch import Tensor

from explainers.errors import InputError
from explainers.report.overlays import is_constant


def check_scores(scores: Tensor, names: Sequence[str], kind: str, model: str) -> None:
    """Raise an InputError that names the first image whose scores are not finite.

    Args:
        scores: a row for each image, (B, ...).
        names: names of the images.
        kind: what the scores are, such as `logits`.
        model: name of the model.
    """
    for row, name in zip(scores, names, strict=True):
        if not row.isfinite().all():
            raise InputError(
                f"expected finite {kind} of {model} for {name}, got NaN or infinity: check its weights, and compute in"
                " float32 without autocast"
            )


def check_heatmaps(heatmaps: Tensor, names: Sequence[str], method: str) -> None:
    """Raise an InputError for heatmaps (B, P, P) that are not finite; warn of those that are constant.

    Args:
        heatmaps: on the CPU.
        names: names of the images.
        method: what computed the heatmaps.
    """
    for heatmap, name in zip(heatmaps, names, strict=True):
        if not heatmap.isfinite().all():
            raise InputError(
                f"expected a finite heatmap of {name}, got NaN or infinity from {method}: take another method, and"
                " compute in float32 without autocast"
            )
    equal = [name for name, same in zip(names, is_constant(heatmaps).tolist(), strict=True) if same]
    if equal and heatmaps[0].numel() > 1:
        shown = ", ".join(equal[:3]) + f" and {len(equal) - 3} more images" * (len(equal) > 3)
        warnings.warn(
            f"{method} gives every patch of {shown} the same score: the heatmap tells nothing; take another method, or"
            " another class",
            stacklevel=2,
        )
