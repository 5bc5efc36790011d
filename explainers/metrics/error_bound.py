"""Error of TVE's attributions, and the upper bound that Theorem 1 gives for it."""

import torch
from torch import Tensor

from explainers.metrics.means import Ratios

LIMIT = 0.5  # largest ε of the averaged patches; the theorem assumes ε ≪ 1


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


class ErrorBound(Ratios):
    """Mean `epsilon`, `bound` and `error` of the patches with ε ≤ `LIMIT`, and their fraction, `covered`."""

    def __init__(self) -> None:
        super().__init__(count=4)

    def update(self, predicted: Tensor, exact: Tensor) -> None:  # type: ignore[override]
        """Add patches, with the arguments of `error_bound`."""
        values = torch.stack(error_bound(predicted.float(), exact.float()), -1).flatten(0, -2)  # (patches, 3)
        covered = values[:, 0] <= LIMIT
        count = covered.sum()[None]
        patches = torch.full_like(count, len(values))
        super().update(torch.cat([values[covered].sum(0), count]), torch.cat([count.expand(3), patches]))

    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]
        ratios = (self.numerators / self.denominators).float()  # NaN where no patch is covered
        return dict(zip(("epsilon", "bound", "error", "covered"), ratios, strict=True))
