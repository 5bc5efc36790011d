"""A trained explainer beside chance and a method without training: their heatmaps, and their fidelity."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from explainers import posthoc
from explainers.app.benchmark import CURVES, measure
from explainers.app.choosing import quick_method
from explainers.masking import PatchGrid
from explainers.metrics.perturbation import curve_columns
from explainers.models import TargetModel

SHOWN = curve_columns(CURVES)
"""Number of an explainer → title of its column."""


def beside(target: TargetModel, grid: PatchGrid) -> dict[str, Any]:
    """Name → explainer: the first quick method that explains the target on this grid, and chance."""
    return {**quick_method(target, grid), "chance": posthoc.build("Chance", target, grid)}


def heatmaps_beside(explainer: Any, images: Tensor) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """What stands beside an explainer, for the predicted classes of uint8 images (B, C, H, W).

    Returns:
        Name → heatmaps (B, P, P), and name → whether they are signed.
    """
    classes = explainer.target(images).argmax(-1)
    compared = beside(explainer.target, explainer.grid)
    heatmaps = {name: other(images, classes) for name, other in compared.items()}
    return heatmaps, {name: other.signed for name, other in compared.items()}


def fidelities(explainer: Any, batches: Iterable[Tensor], levels: int) -> dict[str, dict[str, float]]:
    """Measure an explainer, and what stands beside it, see `measure`.

    Args:
        explainer: a trained explainer, with its `target` and `grid`.
        batches: images, uint8 (B, C, H, W) each.
        levels: number of sparsities, including 0 and 1.

    Returns:
        Explainer → the numbers of `SHOWN`, with their standard errors as `<number>_error`.
    """
    compared = {type(explainer).__name__: explainer, **beside(explainer.target, explainer.grid)}
    results, _ = measure(explainer.target, compared, batches, explainer.grid, levels)
    keys = [key for name in SHOWN for key in (name, f"{name}_error")]
    return {name: {key: float(row[key]) for key in keys if key in row} for name, row in results.items()}


def table(measured: Mapping[str, Mapping[str, float]], images: int) -> str:
    """The fidelities of explainers, with standard errors.

    >>> row = {"fidelity_plus": 0.51, "fidelity_plus_error": 0.02, "fidelity_minus": 0.1}
    >>> print(table({"AnyHead": row}, images=32))
    32 validation images    Fidelity⁺ ↑    Fidelity⁻ ↓
    AnyHead                0.510 ± .020          0.100
    """
    lines = ["".join([f"{f'{images} validation images':20}", *(f"{title:>15}" for title in SHOWN.values())])]
    for name, row in measured.items():
        errors = [f" ± {row[f'{key}_error']:.3f}".replace("0.", ".") if f"{key}_error" in row else "" for key in SHOWN]
        cells = [f"{f'{row[key]:.3f}{error}':>15}" for key, error in zip(SHOWN, errors, strict=True)]
        lines.append("".join([f"{name:20}", *cells]))
    return "\n".join(lines)
