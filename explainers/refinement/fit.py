"""Attributions of patches fitted to pairs of complementary coalitions, by Bayesian ridge regression towards a prior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from explainers.refinement.posterior import Basis, Posterior, leverages_of, posterior_of, spare
from explainers.runtime.modes import to_float64

TINY = 1e-9
"""What is below this part of the largest counts as 0."""


@dataclass(frozen=True)
class Fit:
    """Fitted attributions of N patches, and what their standard errors need, for C columns and M pairs.

    Args:
        values: attributions of the patches, (B, N, C).
        prior: the prior minus its mean over the patches, (B, N, C).
        basis: singular vectors of the coalitions.
        seen: observed differences in the basis of the left singular vectors, (B, r, C).
        beyond: what no attributions explain of the observed differences, (B, M, C).
        posterior: the ridge strengths and the size of the prior.
        leverages: weight of each pair in its own fitted value, (B, M).
    """

    values: Tensor
    prior: Tensor
    basis: Basis
    seen: Tensor
    beyond: Tensor
    posterior: Posterior
    leverages: Tensor

    def heatmaps(self, mixture: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the C columns by weights (B, V, C): attributions of the patches, and standard errors, (B, V, N) each.

        The variance has three parts: that of the posterior for each strength without the errors of pairs; that of the
        fits between the strengths; and that of the errors of pairs, each with its own variance (HC2 of MacKinnon and
        White, 1985: squared residuals, divided by 1 − leverage).
        """
        mixture = to_float64(mixture)
        values = mixture @ self.values.mT
        mean = values - values.mean(-1, keepdim=True)
        prior, seen = mixture @ self.prior.mT, mixture @ self.seen.mT  # (B, V, N), (B, V, r)
        beyond = self.beyond @ mixture.mT  # (B, M, V)
        basis, posterior = self.basis, self.posterior
        spared = spare(posterior.freedom)[:, None]
        along = (prior @ basis.right.mT) * basis.sizes[:, None]
        variance, residual = torch.zeros_like(values), torch.zeros_like(seen)
        for k, strength in enumerate(posterior.strengths):
            probability, factor, of_factor = (each[:, k, None, None] for each in posterior.of_strengths)
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
        return values, (variance + noise).sqrt()


def fit_pairs(
    keep: Tensor,
    observed: Tensor,
    prior: Tensor,
    judged: Tensor,
    total: Tensor | None = None,
    weights: Tensor | None = None,
) -> Fit:
    """Fit v(S) − v(S̄) ≈ Σ_{z ∈ S} φ_z − Σ_{z ∉ S} φ_z, where S̄ is the complement of S, for C columns of v together.

    φ = α π + β + δ, where π is the prior minus its mean over the patches, β is equal for all patches, and Σ_z δ_z = 0.
    Least squares with the penalty λ |δ|² determine α ≥ 0, β and δ for every λ, and the result is the mean over λ, see
    `posterior_of`. All columns share α and λ, which are those of one mixture of the columns.

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
        if weights is not None:
            root = to_float64(weights).sqrt()
            sizes, members, observed = sizes * root, members * root[..., None], observed * root[..., None]
        shift = unit(sizes if total is None else torch.zeros_like(sizes))
        basis = decomposed(without(members, shift))
        left = without(observed, shift)
        seen = basis.left.mT @ left
        beyond = left - basis.left @ seen
        prior = _centred(to_float64(prior))
        along = basis.sizes[..., None] * (basis.right @ prior)
        used = ((along @ judged) * (seen @ judged)).sum((1, 2)) > 0  # α ≥ 0
        prior, along = prior * used[:, None, None], along * used[:, None, None]
        freedom = keep.shape[1] - to_float64(used) - (1 if total is None else 0)
        column = (seen @ judged)[..., 0], (along @ judged)[..., 0], (beyond @ judged).square().sum((1, 2))
        posterior = posterior_of(basis, *column, freedom)
        leverages = shift.square() + leverages_of(basis, posterior, column[1])
        of_seen, of_along = posterior.shrinkage(basis), posterior.shrinkage(basis, posterior.factors)  # (B, r)
        deltas = basis.right.mT @ (of_seen[..., None] * seen - of_along[..., None] * along)
        values = posterior.mean_factor[:, None, None] * prior + deltas
        if total is None:
            scale = sizes.norm(dim=-1).clamp(min=1e-30)[:, None]
            even = (shift[:, None] @ (observed - members @ values))[:, 0] / scale
        else:
            even = to_float64(total) / keep.shape[-1]
    return Fit(values + even[:, None], prior, basis, seen, beyond, posterior, leverages)


def decomposed(rows: Tensor) -> Basis:
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


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors (..., M) to length 1; a vector of zeros stays one."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def without(columns: Tensor, direction: Tensor) -> Tensor:
    """Project columns (B, M, C) onto what is orthogonal to a direction (B, M) of length 1, or 0."""
    return columns - direction[..., None] * (direction[:, None] @ columns)


def _centred(prior: Tensor) -> Tensor:
    """The prior (B, N, C) minus its mean over the patches; 0 where it is constant but for rounding."""
    centred = prior - prior.mean(1, keepdim=True)
    return centred * (centred.abs().amax(1, keepdim=True) > TINY * prior.abs().amax(1, keepdim=True))
