"""Attributions of patches fitted to pairs of complementary coalitions, by ridge regression towards a prior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from explainers.precision import to_float64

STRENGTHS = 10.0 ** torch.arange(-4, 1.6, 0.25, dtype=torch.double)
"""Ridge strengths to choose from, in units of N: variance of a pair that patches cannot explain, relative to the
variance that the deviations of patches from the prior explain. The largest keeps standard errors above 0."""

TINY = 1e-9
"""What is below this part of the largest counts as 0."""


@dataclass(frozen=True)
class Fit:
    """Fitted attributions, and what their standard errors need.

    Args:
        values: attributions of the patches, (B, N, C).
        residuals: observed minus fitted, (B, M, C).
        leverages: weight of each pair in its own fitted value, (B, M).
        spread: variance of each patch, in units of the variance of a pair, (B, N).
    """

    values: Tensor
    residuals: Tensor
    leverages: Tensor
    spread: Tensor

    def heatmaps(self, mixture: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the C columns by weights (B, V, C): attributions of the patches, and standard errors, (B, V, N) each.

        Squared residuals, divided by 1 − leverage, estimate the variance of a pair without bias.
        """
        mixture = to_float64(mixture)
        free = (1 - self.leverages).clamp(min=TINY)[..., None]
        variance = ((self.residuals @ mixture.mT).square() / free).mean(1)  # (B, V)
        return mixture @ self.values.mT, (variance[..., None] * self.spread[:, None]).sqrt()


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
    Least squares with the penalty λ |δ|² determine α ≥ 0, β and δ. λ has the least leave-one-out error. All columns
    share α and λ, which are those of one mixture of the columns.

    Args:
        keep: one coalition S of each pair, boolean (B, M, N).
        observed: v(S) − v(S̄), (B, M, C).
        prior: attributions of the patches, of any size and offset, (B, N, C).
        judged: weights of the columns, (B, C), in the mixture that chooses α and λ.
        total: Σ_z φ_z, which then fixes β, (B, C); `None` to fit β.
        weights: weight of each pair, (B, M); `None` for equal ones.

    Returns:
        The attributions φ of all columns, (B, N, C), and what their standard errors need, in float64.
    """
    with torch.autocast(keep.device.type, enabled=False):
        signs = 2 * to_float64(keep) - 1
        observed = to_float64(observed)
        sizes = signs.sum(-1)
        members = signs - signs.mean(-1, keepdim=True)  # so that δ sums to 0
        if total is not None:
            observed = observed - sizes[..., None] * to_float64(total)[:, None] / keep.shape[-1]
        if weights is not None:
            root = to_float64(weights).sqrt()
            sizes, members, observed = sizes * root, members * root[..., None], observed * root[..., None]
        shift = unit(sizes if total is None else torch.zeros_like(sizes))
        prior = to_float64(prior)
        centred = prior - prior.mean(1, keepdim=True)
        centred = centred * (centred.abs().amax(1, keepdim=True) > TINY * prior.abs().amax(1, keepdim=True))
        factor, strength, leverages = _choose(members, centred, observed, to_float64(judged), shift)
        return _solve(members, factor[:, None, None] * centred, observed, strength, shift, sizes, leverages, total)


def _choose(
    members: Tensor, prior: Tensor, observed: Tensor, judged: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose α (B,) and λ (B,) for the mixture of columns `judged`; also the leverages of the pairs, (B, M).

    β and α have no penalty: the fit of δ sees what their columns, of which `shift` (B, M) and `slope` are an
    orthonormal basis, leave over.
    """
    wanted = (observed @ judged[..., None])[..., 0]  # (B, M)
    along = without(members @ (prior @ judged[..., None]), shift)[..., 0]
    slope = unit(along)
    slope = slope * ((slope * wanted).sum(-1, keepdim=True) > 0)  # α ≥ 0
    rest = without(without(members, shift), slope)
    left = without(without(wanted[..., None], shift), slope)  # (B, M, 1)
    u, s = _left_vectors(rest)
    strengths = STRENGTHS.to(s.device) * members.shape[-1]
    kept = s[:, None].square() / (s[:, None].square() + strengths[:, None])  # (B, strengths, r)
    errors = left - u @ (kept.mT * (u.mT @ left))  # (B, M, strengths)
    leverages = u.square() @ kept.mT + (shift.square() + slope.square())[..., None]  # (B, M, strengths)
    left_out = (errors / (1 - leverages).clamp(min=TINY)).square().mean(1)
    best = left_out.argmin(1)
    strength = strengths[best]
    deltas = rest.mT @ (u @ (u.mT @ left / (s.square() + strength[:, None])[..., None]))  # (B, N, 1)
    free = wanted - (members @ deltas)[..., 0]
    factor = ((slope * free).sum(-1) / along.norm(dim=-1).clamp(min=1e-30)).clamp(min=0)
    return factor, strength, leverages.take_along_dim(best[:, None, None], -1)[..., 0]


def _solve(
    members: Tensor,
    prior: Tensor,
    observed: Tensor,
    strength: Tensor,
    shift: Tensor,
    sizes: Tensor,
    leverages: Tensor,
    total: Tensor | None,
) -> Fit:
    """Fit β and δ of all columns, for given λ and scaled prior (B, N, C)."""
    rows = without(members, shift)
    left = observed - members @ prior
    inverse = _ridge_inverse(rows, strength)
    deltas = inverse.mT @ without(left, shift)
    spread = (1 - 1 / rows.shape[2] - (rows * inverse).sum(1)) / strength[:, None]  # of δ, which sums to 0
    residuals = without(left - members @ deltas, shift)
    if total is None:
        scale = sizes.norm(dim=-1).clamp(min=1e-30)[:, None]
        even = (shift[:, None] @ (left - members @ deltas))[:, 0] / scale
    else:
        even = to_float64(total) / members.shape[-1]
    return Fit(prior + deltas + even[:, None], residuals, leverages, spread.clamp(min=0))


def _left_vectors(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The left singular vectors (B, M, r) and singular values (B, r) of rows (B, M, N), by the smaller Gram matrix."""
    if rows.shape[1] <= rows.shape[2]:
        squares, u = torch.linalg.eigh(rows @ rows.mT)
        positive = squares > TINY * squares[:, -1:]
        return u * positive[:, None], (squares * positive).sqrt()
    squares, v = torch.linalg.eigh(rows.mT @ rows)
    positive = squares > TINY * squares[:, -1:]
    s = (squares * positive).sqrt()
    return rows @ (v * (positive / s.clamp(min=1e-30))[:, None]), s


def _ridge_inverse(rows: Tensor, strength: Tensor) -> Tensor:
    """A (Aᵀ A + λ)⁻¹ = (A Aᵀ + λ)⁻¹ A of rows A (B, M, N), by the smaller matrix: (B, M, N)."""
    few = rows.shape[1] <= rows.shape[2]
    gram = rows @ rows.mT if few else rows.mT @ rows
    gram.diagonal(dim1=1, dim2=2).add_(strength[:, None])
    lower = torch.linalg.cholesky(gram)
    return torch.cholesky_solve(rows, lower) if few else torch.cholesky_solve(rows.mT, lower).mT


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors (..., M) to length 1; a vector of zeros stays one."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def without(columns: Tensor, direction: Tensor) -> Tensor:
    """Project columns (B, M, C) onto what is orthogonal to a direction (B, M) of length 1, or 0."""
    return columns - direction[..., None] * (direction[:, None] @ columns)
