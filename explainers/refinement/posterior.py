"""What pairs of coalitions tell about the strength of a ridge regression, and about the size of its prior."""

from dataclasses import dataclass

import torch
from torch import Tensor

STRENGTHS = 10.0 ** torch.arange(-4, 3.1, 0.25, dtype=torch.double)
"""Ridge strengths that are averaged, in units of N: variance of a pair that patches cannot explain, relative to the
variance that the deviations of patches from the prior explain."""

BELIEF = 2.0, 0.5
"""Parameters of the beta distribution that 1 / (1 + strength), the explained part of the variance, has before any pair.
Few pairs hardly tell it; `benchmarks/coverage.py` measures that intervals are then wide enough."""


@dataclass(frozen=True)
class Basis:
    """Singular vectors of the coalitions of M pairs of N patches.

    Args:
        left: left singular vectors, (B, M, r).
        sizes: singular values, (B, r).
        right: right singular vectors, (B, r, N), which sum to 0 over the patches.
    """

    left: Tensor
    sizes: Tensor
    right: Tensor

    def unknown(self, strength: Tensor) -> Tensor:
        """Variance of δ of each patch, relative to that of a pair's error, if pairs had no errors: (B, N)."""
        squares = self.right.square()
        beyond = (1 - 1 / squares.shape[-1] - squares.sum(1)).clamp(min=0)
        return (squares * (strength / (self.sizes.square() + strength).square())[..., None]).sum(1) + beyond / strength


@dataclass(frozen=True)
class Posterior:
    """The strengths λ, and α for each of them.

    Args:
        strengths: λ, (K,).
        probabilities: of the strengths, (B, K).
        factors: α for each strength, (B, K).
        factor_variances: the variance of α for each strength, (B, K).
        freedom: degrees of freedom of the errors: pairs minus numbers without a penalty, (B,).
    """

    strengths: Tensor
    probabilities: Tensor
    factors: Tensor
    factor_variances: Tensor
    freedom: Tensor

    @property
    def of_strengths(self) -> tuple[Tensor, Tensor, Tensor]:
        """What there is for each strength, (B, K) each."""
        return self.probabilities, self.factors, self.factor_variances

    @property
    def mean_factor(self) -> Tensor:
        """The mean of α over the strengths, (B,)."""
        return (self.probabilities * self.factors).sum(1)

    def shrinkage(self, basis: Basis, times: Tensor | float = 1.0) -> Tensor:
        """The mean over the strengths of s / (s² + λ) · `times` (B, K), for each singular value s: (B, r)."""
        inverse = basis.sizes[:, None] / (basis.sizes.square()[:, None] + self.strengths[:, None])  # (B, K, r)
        return ((self.probabilities * times)[..., None] * inverse).sum(1)


def posterior_of(basis: Basis, seen: Tensor, along: Tensor, beyond: Tensor, freedom: Tensor) -> Posterior:
    """Weigh the strengths by their posterior probability, and find α for each, for one column.

    The errors of pairs, and δ, are normal, and λ is the ratio of their variances. α, β and the variance of the errors
    are integrated out: all values of α and β are as likely as others, and all orders of magnitude of the variance.

    Args:
        basis: singular vectors of the coalitions.
        seen: observed differences in the basis of the left singular vectors, (B, r).
        along: those of the prior, (B, r); 0 for no prior.
        beyond: sum of squares of what no attributions explain, (B,).
        freedom: see `Posterior`.
    """
    relative = STRENGTHS.to(seen.device)
    strengths = relative * basis.right.shape[-1]
    gain = basis.sizes[:, None].square() / strengths[:, None]  # (B, K, r)
    information = (along[:, None].square() / (1 + gain)).sum(-1)  # on α, (B, K)
    used = information > 0
    information = information.where(used, torch.ones_like(information))
    factors = ((along * seen)[:, None] / (1 + gain)).sum(-1).clamp(min=0) / information
    missed = seen[:, None] - factors[..., None] * along[:, None]
    squares = (missed.square() / (1 + gain)).sum(-1) + beyond[:, None]
    evidence = -0.5 * (gain.log1p().sum(-1) + information.log() + freedom[:, None] * (squares + 1e-300).log())
    explained = 1 / (1 + relative)
    belief = BELIEF[0] * explained.log() + BELIEF[1] * (-explained).log1p()  # of log λ, which is evenly spaced
    variances = used * squares / spare(freedom)[:, None] / information
    return Posterior(strengths, (evidence + belief).softmax(-1), factors, variances, freedom)


def leverages_of(basis: Basis, posterior: Posterior, along: Tensor) -> Tensor:
    """Weight of each pair in its own fitted value, but for β: (B, M); see `posterior_of` for `along`."""
    shrunk = posterior.strengths[:, None] / (basis.sizes.square()[:, None] + posterior.strengths[:, None])  # (B, K, r)
    information = (along[:, None].square() * shrunk).sum(-1).clamp(min=1e-300)
    of_factor = ((along[:, None] * shrunk) @ basis.left.mT).square() / information[..., None]  # (B, K, M)
    of_deltas = (1 - shrunk) @ basis.left.square().mT
    return (posterior.probabilities[..., None] * (of_factor + of_deltas)).sum(1)


def spare(freedom: Tensor) -> Tensor:
    """Divisor of a sum of squares with f degrees of freedom, such that two standard errors are a 95 % interval.

    f − 2 gives the variance of Student's t, whose 95 % interval is, for f ≥ 3, within 4 % that of a normal distribution
    of this variance. For f = 2, whose variance is infinite, 0.4 gives the interval.
    """
    return (freedom - 2).clamp(min=0.4)
