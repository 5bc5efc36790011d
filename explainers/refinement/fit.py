"""Attributions of patches fitted to pairs of complementary coalitions, by Bayesian ridge regression towards a prior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from explainers.runtime.modes import to_float64

STRENGTHS = 10.0 ** torch.arange(-4, 3.1, 0.25, dtype=torch.double)
"""Ridge strengths that are averaged, in units of N: variance of a pair that patches cannot explain, relative to the
variance that the deviations of patches from the prior explain."""

BELIEF = 2.0, 0.5
"""Parameters of the beta distribution that 1 / (1 + strength), the explained part of the variance, has before any pair.
Few pairs hardly tell it; by the measurements in docs/how_to/refine.md, intervals are then wide enough."""

TINY = 1e-9  # values below this part of the largest count as 0


@dataclass(frozen=True)
class Basis:
    """Singular values and vectors of the coalitions of M pairs of N patches."""

    left: Tensor  # (B, M, r)
    sizes: Tensor  # singular values, (B, r)
    right: Tensor  # (B, r, N); they sum to 0 over the patches

    def unknown(self, strength: Tensor) -> Tensor:
        """Variance of δ of each patch, relative to that of a pair's error, if pairs had no errors: (B, N)."""
        squares = self.right.square()
        beyond = (1 - 1 / squares.shape[-1] - squares.sum(1)).clamp(min=0)
        return (squares * (strength / (self.sizes.square() + strength).square())[..., None]).sum(1) + beyond / strength


@dataclass(frozen=True)
class Posterior:
    """The strengths λ, and the size α of the prior for each of them."""

    strengths: Tensor  # λ, (K,)
    probabilities: Tensor  # of the strengths, (B, K)
    factors: Tensor  # α for each strength, (B, K)
    factor_variances: Tensor  # the variance of α for each strength, (B, K)
    freedom: Tensor  # degrees of freedom of the errors: different pairs minus numbers without a penalty, (B,)

    @property
    def mean_factor(self) -> Tensor:
        """The mean of α over the strengths, (B,)."""
        return (self.probabilities * self.factors).sum(1)

    def shrinkage(self, basis: Basis, times: Tensor | float = 1.0) -> Tensor:
        """The mean over the strengths of s / (s² + λ) · `times` (B, K), for each singular value s: (B, r)."""
        inverse = basis.sizes[:, None] / (basis.sizes.square()[:, None] + self.strengths[:, None])  # (B, K, r)
        return ((self.probabilities * times)[..., None] * inverse).sum(1)


@dataclass(frozen=True)
class Regression:
    """Fitted attributions of N patches, and what their standard errors need, for C columns and M pairs."""

    values: Tensor  # attributions of the patches, (B, N, C)
    prior: Tensor  # the prior minus its mean over the patches, (B, N, C)
    basis: Basis
    seen: Tensor  # observed differences in the basis of the left singular vectors, (B, r, C)
    beyond: Tensor  # what no attributions explain of the observed differences, (B, M, C)
    posterior: Posterior
    leverages: Tensor  # weight of each pair in its own fitted value, (B, M)

    def heatmaps(self, mixture: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the C columns by weights (B, V, C): attributions of the patches, and standard errors, (B, V, N) each.

        The variance has three parts: that of the posterior for each strength without the errors of pairs; that of the
        fits between the strengths; and that of the errors of pairs, each with its own variance (HC2 of MacKinnon and
        White, 1985: squared residuals, divided by 1 − leverage). With less than two degrees of freedom, nothing tells
        the errors, and standard errors are infinite.
        """
        mixture = to_float64(mixture)
        values = mixture @ self.values.mT
        mean = values - values.mean(-1, keepdim=True)
        prior, seen = mixture @ self.prior.mT, mixture @ self.seen.mT  # (B, V, N), (B, V, r)
        beyond = self.beyond @ mixture.mT  # (B, M, V)
        basis, posterior = self.basis, self.posterior
        spared = variance_divisor(posterior.freedom)[:, None]
        along = (prior @ basis.right.mT) * basis.sizes[:, None]
        variance, residual = torch.zeros_like(values), torch.zeros_like(seen)
        of_strengths = posterior.probabilities, posterior.factors, posterior.factor_variances
        for k, strength in enumerate(posterior.strengths):
            probability, factor, of_factor = (each[:, k, None, None] for each in of_strengths)
            shrunk = 1 / (basis.sizes.square() + strength)  # (B, r)
            missed = seen - factor * along
            squares = (strength * shrunk[:, None] * missed.square()).sum(-1) + beyond.square().sum(1)  # (B, V)
            inverse = (basis.sizes * shrunk)[:, None]
            deltas = (inverse * missed) @ basis.right
            moved = prior - (inverse * along) @ basis.right  # by a larger α
            unknown = (squares / spared)[..., None] * basis.unknown(strength)[:, None] + of_factor * moved.square()
            variance += probability * (unknown + (factor * prior + deltas - mean).square())
            residual += probability * (strength * shrunk[:, None] * missed)
        errors = (basis.left @ residual.mT + beyond).square() / (1 - self.leverages).clamp(min=TINY)[..., None]
        influence = (basis.left * posterior.shrinkage(basis)[:, None]) @ basis.right  # of pairs on δ, (B, M, N)
        noise = (errors * (posterior.freedom / spared[:, 0])[:, None, None]).mT @ influence.square()
        return values, (variance + noise).sqrt().masked_fill((posterior.freedom < 2)[:, None, None], torch.inf)


def fit_pairs(
    keep: Tensor,
    observed: Tensor,
    prior: Tensor,
    judged: Tensor,
    total: Tensor | None = None,
    weights: Tensor | None = None,
) -> Regression:
    """Fit v(S) − v(S̄) ≈ Σ_{z ∈ S} φ_z − Σ_{z ∉ S} φ_z, where S̄ is the complement of S, for C columns of v together.

    φ = α π + β + δ, where π is the prior minus its mean over the patches, β is equal for all patches, and Σ_z δ_z = 0.
    Least squares with the penalty λ |δ|² determine α ≥ 0, β and δ for every λ, and the result is the mean over λ, see
    `compute_posterior`. All columns share α and λ, which are those of one mixture of the columns.

    Args:
        keep: one coalition S of each pair, boolean (B, M, N).
        observed: v(S) − v(S̄), (B, M, C).
        prior: attributions of the patches, of any size and offset, (B, N, C).
        judged: weights of the columns, (B, C), in the mixture that determines α and λ.
        total: Σ_z φ_z, which then fixes β, (B, C); `None` to fit β.
        weights: weight of each pair, (B, M); `None` for equal ones.

    Returns:
        The attributions φ of all columns, (B, N, C), and what their standard errors need, in float64.
    """
    with torch.autocast(keep.device.type, enabled=False):
        signs = 2 * to_float64(keep) - 1
        observed, judged = to_float64(observed), to_float64(judged)[..., None]
        sizes = signs.sum(-1)
        members = signs - signs.mean(-1, keepdim=True)  # so that δ sums to 0
        if total is not None:
            observed = observed - sizes[..., None] * to_float64(total)[:, None] / keep.shape[-1]
        observed, times = merge_pairs(signs, observed)
        root = (times if weights is None else times * to_float64(weights)).sqrt()
        sizes, members, observed = sizes * root, members * root[..., None], observed * root[..., None]
        shift = normalise(sizes if total is None else torch.zeros_like(sizes))
        basis = decompose(project_out(members, shift))
        left = project_out(observed, shift)
        seen = basis.left.mT @ left
        beyond = left - basis.left @ seen
        prior = _subtract_mean(to_float64(prior))
        along = basis.sizes[..., None] * (basis.right @ prior)
        used = ((along @ judged) * (seen @ judged)).sum((1, 2)) > 0  # α ≥ 0
        prior, along = prior * used[:, None, None], along * used[:, None, None]
        freedom = (times > 0).sum(1) - to_float64(used) - (1 if total is None else 0)
        column = (seen @ judged)[..., 0], (along @ judged)[..., 0], (beyond @ judged).square().sum((1, 2))
        posterior = compute_posterior(basis, keep.shape[-1], *column, freedom)
        leverages = shift.square() + compute_leverages(basis, posterior, column[1])
        of_seen, of_along = posterior.shrinkage(basis), posterior.shrinkage(basis, posterior.factors)  # (B, r)
        deltas = basis.right.mT @ (of_seen[..., None] * seen - of_along[..., None] * along)
        values = posterior.mean_factor[:, None, None] * prior + deltas
        if total is None:
            scale = sizes.norm(dim=-1).clamp(min=1e-30)[:, None]
            even = (shift[:, None] @ (observed - members @ values))[:, 0] / scale
        else:
            even = to_float64(total) / keep.shape[-1]
    return Regression(values + even[:, None], prior, basis, seen, beyond, posterior, leverages)


def merge_pairs(signs: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Average what pairs of one coalition, or of its complement, observe: such pairs tell no more than one of them.

    Args:
        signs: 1 for the patches of the coalition and −1 for others, float64 (B, M, N).
        observed: v(S) − v(S̄), (B, M, C).

    Returns:
        The means, (B, M, C), and how often each coalition was drawn, (B, M): 0 at all of its pairs but the first.

    >>> signs = torch.tensor([[[1.0, 1, -1], [1, -1, -1], [-1, -1, 1]]])
    >>> [each.flatten().tolist() for each in merge_pairs(signs, torch.tensor([[[2.0], [7], [-4]]]))]
    [[3.0, 7.0, -3.0], [2.0, 1.0, 0.0]]
    """
    alike = (signs @ signs.mT / signs.shape[-1]).trunc()  # 1 for equal coalitions, −1 for complements
    times = alike.abs().sum(-1)
    return alike @ observed / times[..., None], times * (alike.tril(-1) == 0).all(-1)


def decompose(rows: Tensor) -> Basis:
    """The singular vectors of rows (B, M, N), from the eigenvectors of the smaller Gram matrix.

    Vectors of the other side are 0 where the singular value is.
    """
    few = rows.shape[1] <= rows.shape[2]
    squares, vectors = torch.linalg.eigh(rows @ rows.mT if few else rows.mT @ rows)
    positive = squares > TINY * squares[:, -1:]
    sizes = (squares * positive).sqrt()
    inverse = positive / sizes.clamp(min=1e-30)
    if few:
        return Basis(vectors, sizes, inverse[..., None] * (vectors.mT @ rows))
    return Basis(rows @ (vectors * inverse[:, None]), sizes, vectors.mT * positive[..., None])


def normalise(vectors: Tensor) -> Tensor:
    """Scale vectors (..., M) to length 1; a vector of zeros stays one."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def project_out(columns: Tensor, direction: Tensor) -> Tensor:
    """Remove from columns (B, M, C) their part along a direction (B, M) of length 1, or 0."""
    return columns - direction[..., None] * (direction[:, None] @ columns)


def _subtract_mean(prior: Tensor) -> Tensor:
    """The prior (B, N, C) minus its mean over the patches; 0 where it is constant but for rounding."""
    centred = prior - prior.mean(1, keepdim=True)
    return centred * (centred.abs().amax(1, keepdim=True) > TINY * prior.abs().amax(1, keepdim=True))


def compute_posterior(
    basis: Basis, unit: int, seen: Tensor, along: Tensor, beyond: Tensor, freedom: Tensor
) -> Posterior:
    """Weigh the strengths by their posterior probability, and find α for each, for one column.

    The errors of pairs, and δ, are normal, and λ is the ratio of their variances. α, β and the variance of the errors
    are integrated out: all values of α and β are as likely as others, and all orders of magnitude of the variance.

    Args:
        basis: singular vectors of the coalitions.
        unit: of the strengths, see `STRENGTHS`.
        seen: observed differences in the basis of the left singular vectors, (B, r).
        along: those of the prior, (B, r); 0 for no prior.
        beyond: sum of squares of what no attributions explain, (B,).
        freedom: see `Posterior`.
    """
    relative = STRENGTHS.to(seen.device)
    strengths = relative * unit
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
    variances = used * squares / variance_divisor(freedom)[:, None] / information
    return Posterior(strengths, (evidence + belief).softmax(-1), factors, variances, freedom)


def compute_leverages(basis: Basis, posterior: Posterior, along: Tensor) -> Tensor:
    """Weight of each pair in its own fitted value, but for β: (B, M); see `compute_posterior` for `along`."""
    shrunk = posterior.strengths[:, None] / (basis.sizes.square()[:, None] + posterior.strengths[:, None])  # (B, K, r)
    information = (along[:, None].square() * shrunk).sum(-1).clamp(min=1e-300)
    of_factor = ((along[:, None] * shrunk) @ basis.left.mT).square() / information[..., None]  # (B, K, M)
    of_deltas = (1 - shrunk) @ basis.left.square().mT
    return (posterior.probabilities[..., None] * (of_factor + of_deltas)).sum(1)


def variance_divisor(freedom: Tensor) -> Tensor:
    """Divisor of a sum of squares with f degrees of freedom, such that two standard errors are a 95 % interval.

    f − 2 gives the variance of Student's t, whose 95 % interval is, for f ≥ 3, within 4 % that of a normal distribution
    of this variance. For f = 2, whose variance is infinite, 0.4 gives the interval.
    """
    return (freedom - 2).clamp(min=0.4)
