"""Faithfulness: how the prediction changes while patches are removed or kept in order of importance."""

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric

from explainers.masking import PatchGrid, level_sizes, masked_forward, most_important


@torch.no_grad()
def perturbation_sweep(
    predict: Callable[[Tensor], Tensor],
    images: Tensor,
    scores: Tensor,
    classes: Tensor,
    grid: PatchGrid,
    levels: int = 21,
    fill: Tensor | float = 0.0,
    chunk_size: int = 256,
) -> tuple[Tensor, Tensor]:
    """The probability of each image's class without S*, and with S* alone, at every sparsity.

    Every faithfulness metric reads off these two curves: without S* is deletion, S* alone is insertion.

    Args:
        predict: normalised images (b, C, H, W) → class probabilities (b, K).
        images: (B, C, H, W), normalised.
        scores: (B, N), higher is more important.
        classes: (B,).

    Returns:
        `removed` and `preserved`, (B, levels) each. The whole image is `removed[:, 0]` and `preserved[:, -1]`.
    """
    important = most_important(scores, levels)  # (B, L, N)
    keep = torch.cat([~important, important[:, 1:-1]], 1)  # the two ends of both curves are the same two images
    probabilities = masked_forward(predict, images, keep, grid, fill, chunk_size)  # (B, 2·L − 2, K)
    of_class = probabilities.gather(-1, classes[:, None, None].expand(-1, keep.shape[1], 1)).squeeze(-1).float()
    removed, between = of_class.split([levels, levels - 2], 1)
    return removed, torch.cat([removed[:, -1:], between, removed[:, :1]], 1)


class Fidelity(Metric):
    """Area under the fidelity-sparsity curves, averaged over images (TVE, Appendix G).

    Fidelity⁺(s) = f(x)_y − f(x without S*)_y    higher is better: what mattered is gone
    Fidelity⁻(s) = f(x)_y − f(only S* of x)_y    lower is better: what mattered is kept

    `compute` gives `images`, their number; the levels of `sparsity`; both areas (trapezoids over the true fractions
    |S*| / N) as `fidelity_plus` and `fidelity_minus`; their standard errors over images, `..._error`; and the curves,
    `..._curve`, (levels,).
    """

    columns = {"fidelity_plus": "Fidelity⁺ ↑", "fidelity_minus": "Fidelity⁻ ↓"}
    higher_is_better = None  # one of each
    is_differentiable = False
    full_state_update = False
    curves: Tensor
    areas: Tensor
    squares: Tensor
    images: Tensor

    def __init__(self, num_patches: int, levels: int = 21) -> None:
        super().__init__()
        self.sparsity = level_sizes(num_patches, levels).double() / num_patches
        self.add_state("curves", torch.zeros(2, levels, dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("areas", torch.zeros(2, dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("squares", torch.zeros(2, dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("images", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, removed: Tensor, preserved: Tensor) -> None:
        """Both curves of `perturbation_sweep`, (B, levels)."""
        curves = removed[:, None, :1].double() - torch.stack([removed, preserved], 1)  # (B, 2, L)
        areas = torch.trapezoid(curves, self.sparsity.to(curves.device), dim=-1)  # (B, 2)
        self.curves += curves.sum(0)
        self.areas += areas.sum(0)
        self.squares += areas.square().sum(0)
        self.images += len(removed)

    def compute(self) -> dict[str, Tensor]:
        mean, count = self.areas / self.images, self.images
        variance = (self.squares / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
        error = (variance / count).sqrt()
        found = {"images": count, "sparsity": self.sparsity}
        for side, name in enumerate(("fidelity_plus", "fidelity_minus")):
            found |= {name: mean[side], f"{name}_error": error[side], f"{name}_curve": self.curves[side] / count}
        return found
