"""Error of TVE's attributions, and the upper bound that Theorem 1 gives for it."""

import torch
from torch import Tensor

from explainers.errors import check_positive
from explainers.metrics.optional import Metric


def error_bound(predicted: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ε, the bound 2ε / (1 − ε) and the error |φ̂ − φ| of every patch (Equation 9).

    Args:
        predicted: log-probabilities of the explained class for the predicted ĝ and ĥ, (..., 2).
        exact: log-probabilities of the explained class for the exact g and h, (..., 2).

    Returns:
        ε, the bound and the error, (...) each. ε is the larger of |H(ĝ; y) / H(g; y) − 1| and the same value for h. The
        bound is infinite where ε ≥ 1, because the theorem does not hold there.

    The probability is 0.6 for ĝ and 0.5 for g, so ε = 0.2 and the error is log 1.2:

    >>> predicted, exact = torch.tensor([0.6, 0.5]).log(), torch.tensor([0.5, 0.5]).log()
    >>> [round(value.item(), 3) for value in error_bound(predicted, exact)]
    [0.2, 0.5, 0.182]
    """
    epsilon = (predicted - exact).expm1().abs().amax(-1)
    bound = torch.where(epsilon < 1, 2 * epsilon / (1 - epsilon), torch.inf)
    error = ((predicted[..., 0] - predicted[..., 1]) - (exact[..., 0] - exact[..., 1])).abs()
    return epsilon, bound, error


class ErrorBound(Metric):
    """Mean ε, bound and error of the patches with ε ≤ `limit`, and the fraction of patches with ε ≤ `limit`.

    `compute` returns the means as `epsilon`, `bound` and `error`, and the fraction as `covered`.

    Args:
        limit: largest ε of the averaged patches, above 0; the theorem assumes ε ≪ 1.

    Two patches, with ε = 0 and ε = 1:

    >>> metric = ErrorBound(limit=0.5)
    >>> metric.update(torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), torch.tensor([[0.5, 0.5], [0.25, 0.5]]).log())
    >>> {name: value.item() for name, value in metric.compute().items()}
    {'epsilon': 0.0, 'bound': 0.0, 'error': 0.0, 'covered': 0.5}
    """

    full_state_update = False
    sums: Tensor
    covered: Tensor
    patches: Tensor

    def __init__(self, limit: float = 0.5) -> None:
        super().__init__()
        check_positive(limit=limit)
        self.limit = limit
        self.add_state("sums", torch.zeros(3), dist_reduce_fx="sum")
        self.add_state("covered", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("patches", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, exact: Tensor) -> None:
        """Add patches, with the arguments of `error_bound`."""
        values = torch.stack(error_bound(predicted.float(), exact.float()), -1).flatten(0, -2)  # (patches, 3)
        covered = values[:, 0] <= self.limit
        self.sums += values[covered].sum(0)
        self.covered += covered.sum()
        self.patches += len(values)

    def compute(self) -> dict[str, Tensor]:
        epsilon, bound, error = self.sums / self.covered  # NaN where no patch is covered
        return {"epsilon": epsilon, "bound": bound, "error": error, "covered": self.covered / self.patches}
