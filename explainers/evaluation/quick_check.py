"""What stands beside an explainer while it is trained: chance, and a method without training."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from explainers.evaluation.evaluation import Evaluation, measure
from explainers.evaluation.result import CURVES, columns_of
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc import build
from explainers.posthoc.defaults import quick_method


def build_baselines(target: TargetModel, grid: PatchGrid) -> dict[str, nn.Module]:
    """Name → explainer: the first quick method that explains the target on this grid, and chance."""
    return {**quick_method(target, grid), "chance": build("Chance", target, grid)}


def explain_by_baselines(explainer: Any, images: Tensor) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """Explain the predicted classes of uint8 images (B, C, H, W) by what stands beside an explainer.

    Returns:
        Name → heatmaps (B, P, P), and name → whether they are signed.
    """
    classes = explainer.target(images).argmax(-1)
    baselines: dict[str, Any] = dict(build_baselines(explainer.target, explainer.grid))
    heatmaps = {name: baseline(images, classes) for name, baseline in baselines.items()}
    return heatmaps, {name: baseline.signed for name, baseline in baselines.items()}


def measure_beside_baselines(explainer: Any, batches: Iterable[Tensor], levels: int) -> dict[str, dict[str, float]]:
    """Measure the fidelity of an explainer, and of what stands beside it, see `measure`.

    Args:
        explainer: a trained explainer, with its `target` and `grid`.
        batches: images, uint8 (B, C, H, W) each.
        levels: number of sparsities, including 0 and 1.

    Returns:
        Explainer → numbers of `CURVES`, with their standard errors as `<number>_error`.
    """
    explainers = {type(explainer).__name__: explainer, **build_baselines(explainer.target, explainer.grid)}
    settings = Evaluation(explainer.grid, CURVES, levels, localization=(), agreement=())
    results, _ = measure(explainer.target, explainers, ({"image": images} for images in batches), settings)
    keys = [key for name in columns_of(CURVES, cost=False) for key in (name, f"{name}_error")]
    return {name: {key: float(row[key]) for key in keys if key in row} for name, row in results.items()}
