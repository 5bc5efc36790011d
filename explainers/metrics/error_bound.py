"""Theorem 1 of TVE, measured: how far the attributions are off, and how far they can be."""

import torch
from torch import Tensor
from torchmetrics import Metric


def error_bound(predicted: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ε, its bound 2ε / (1 − ε) and the error |φ̂ − φ| of every patch (Equation 9).

    Args:
        predicted, exact: log-probabilities of the explained class, of ĝ and ĥ, and of g and h; (..., 2).

    Returns:
        Three tensors (...). ε is the larger of |H(ĝ; y) / H(g; y) − 1| and the same of h; the bound is infinite where
        ε is 1 or more, and the theorem says nothing.
    """
    epsilon = (predicted - exact).expm1().abs().amax(-1)
    bound = torch.where(epsilon < 1, 2 * epsilon / (1 - epsilon), torch.inf)
    return epsilon, bound, ((predicted[..., 0] - predicted[..., 1]) - (exact[..., 0] - exact[..., 1])).abs()


class ErrorBound(Metric):
    """The share of patches with ε of at most `limit` (the theorem wants ε ≪ 1), and their mean ε, bound and error."""

    full_state_update = False
    sums: Tensor
    covered: Tensor
    patches: Tensor

    def __init__(self, limit: float = 0.5) -> None:
        super().__init__()
        self.limit = limit
        self.add_state("sums", torch.zeros(3), dist_reduce_fx="sum")
        self.add_state("covered", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("patches", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, exact: Tensor) -> None:
        found = torch.stack(error_bound(predicted.float(), exact.float()), -1).flatten(0, -2)
        covered = found[:, 0] <= self.limit
        self.sums += found[covered].sum(0)
        self.covered += covered.sum()
        self.patches += len(found)

    def compute(self) -> dict[str, Tensor]:
        epsilon, bound, error = self.sums / self.covered  # NaN where no patch is covered
        return {"epsilon": epsilon, "bound": bound, "error": error, "covered": self.covered / self.patches}
