"""Faithfulness: change of the prediction when patches are removed, or kept, in order of importance."""

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric

from explainers.masking import level_sizes, most_important


@torch.no_grad()
def perturbation_sweep(
    predict: Callable[[Tensor], Tensor],
    scores: Tensor,
    classes: Tensor,
    levels: int = 21,
) -> tuple[Tensor, Tensor]:
    """Compute the probability of each image's class without S*, and with S* only, at every sparsity.

    All faithfulness metrics are computed from these two curves: the first is deletion, the second insertion.

    Args:
        predict: the visible patches, boolean (B, M, N) → class probabilities (B, M, K), see `masked_probabilities`.
        scores: (B, N), higher is more important.
        classes: the class of each image, (B,).
        levels: number of sparsities from 0 to 1, at least 2.

    Returns:
        `removed` and `preserved`, (B, levels) each. The whole image is `removed[:, 0]` and `preserved[:, -1]`.

    >>> image = torch.tensor([[0.5], [0.25], [0.125], [0.125]])  # the probability is the sum of the visible patches
    >>> scores, classes = torch.tensor([[4, 3, 2, 1]]), torch.tensor([0])
    >>> curves = perturbation_sweep(lambda keep: keep.float() @ image, scores, classes, levels=3)
    >>> [curve.tolist() for curve in curves]
    [[[1.0, 0.25, 0.0]], [[0.0, 0.75, 1.0]]]
    """
    important = most_important(scores, levels)  # (B, L, N)
    keep = torch.cat([~important, important[:, 1:-1]], 1)  # both curves end in the same two images
    probabilities = predict(keep)  # (B, 2·L − 2, K)
    of_class = probabilities.gather(-1, classes[:, None, None].expand(-1, keep.shape[1], 1)).squeeze(-1).float()
    removed, between = of_class.split([levels, levels - 2], 1)
    return removed, torch.cat([removed[:, -1:], between, removed[:, :1]], 1)


class Fidelity(Metric):
    """Area under the fidelity-sparsity curves, averaged over images (TVE, Appendix G).

    Fidelity⁺(s) = f(x)_y − f(x without S*)_y    higher is better: the important patches are removed
    Fidelity⁻(s) = f(x)_y − f(only S* of x)_y    lower is better: the important patches are kept

    `compute` returns a dictionary of:

    - `images`: number of images.
    - `sparsity`: the exact fractions |S*| / N, (levels,).
    - `fidelity_plus`, `fidelity_minus`: mean areas, by the trapezoidal rule over `sparsity`.
    - `fidelity_plus_error`, `fidelity_minus_error`: standard errors of the mean areas over images; missing for a
      single image.
    - `fidelity_plus_curve`, `fidelity_minus_curve`: mean curves, (levels,).

    Args:
        num_patches: N.
        levels: number of sparsities from 0 to 1, at least 2.

    >>> metric = Fidelity(num_patches=4, levels=3)
    >>> metric.update(removed=torch.tensor([[1.0, 0.25, 0.0]]), preserved=torch.tensor([[0.0, 0.75, 1.0]]))
    >>> result = metric.compute()
    >>> result["fidelity_plus_curve"].tolist(), result["fidelity_plus"].item(), result["fidelity_minus"].item()
    ([0.0, 0.75, 1.0], 0.625, 0.375)
    """

    columns = {"fidelity_plus": "Fidelity⁺ ↑", "fidelity_minus": "Fidelity⁻ ↓"}
    higher_is_better = None  # higher is better for one area, lower for the other
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
        """Add the curves of images, (B, levels) each, as `perturbation_sweep` returns them."""
        curves = removed[:, None, :1].double() - torch.stack([removed, preserved], 1)  # (B, 2, L)
        areas = torch.trapezoid(curves, self.sparsity.to(curves.device), dim=-1)  # (B, 2)
        self.curves += curves.sum(0)
        self.areas += areas.sum(0)
        self.squares += areas.square().sum(0)
        self.images += len(removed)

    def compute(self) -> dict[str, Tensor]:
        mean, count = self.areas / self.images, self.images
        variance = (self.squares / count - mean.square()).clamp(min=0) / (count - 1)  # of the mean
        result = {"images": count, "sparsity": self.sparsity}
        for side, name in enumerate(("fidelity_plus", "fidelity_minus")):
            result |= {name: mean[side], f"{name}_curve": self.curves[side] / count}
            if count > 1:
                result[f"{name}_error"] = variance[side].sqrt()
        return result
