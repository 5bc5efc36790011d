"""Which two regions of an image matter together: the second order of what pairs of masked images tell."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.refinement.fit import (
    TINY,
    Posterior,
    Spectrum,
    compute_leverages,
    compute_posterior,
    variance_divisor,
)
from explainers.runtime.modes import to_float64

SMOOTH = 1.0
"""Standard deviation, in patches, of the normal density of the distance that Q is. On eight photos, what pairs of
masked images tell of a class is most probable with 1, among 0, 0.5, 1, 1.5, 2 and 3."""


class Interactions(NamedTuple):
    """The T strongest interactions of each image, the largest absolute value first, see `fit_interactions`.

    Values are shrunk towards 0, most of them by more than half. Standard errors say how far the interaction may be
    from its value if it is as large as others of the image; a single large one is further away.
    """

    pairs: Tensor  # numbers of two cells, row by row, (B, T, 2)
    values: Tensor  # (B, T)
    errors: Tensor  # standard errors, (B, T)
    shape: tuple[int, int]  # rows and columns of cells


@dataclass(frozen=True)
class SecondOrder:
    """Fitted interactions of C cells, and what their standard errors need, for M pairs."""

    members: Tensor  # Σ_{z ∈ c} of the smoothed s_z, of each pair and cell, (B, M, C)
    spread: Tensor  # Σ_{z ∈ c, w ∈ d} of the smoothing of z and w, (C, C)
    spectrum: Spectrum
    seen: Tensor  # observed means in the basis of the singular vectors, (B, M)
    posterior: Posterior
    leverages: Tensor  # weight of each pair in its own fitted value, (B, M)

    @property
    def values(self) -> Tensor:
        """The interactions of all cells, (B, C, C); the diagonal means nothing."""
        inverse = self.posterior.probabilities[..., None] * self._inverse()
        weights = self.spectrum.left @ (inverse.sum(1) * self.seen)[..., None]
        return 4 * self.members.mT @ (weights * self.members)

    def errors(self, pairs: Tensor) -> Tensor:
        """The standard errors (B, T) of pairs of cells (B, T, 2); their parts are those of `Regression.heatmaps`."""
        first, second = (self.members.take_along_dim(each[:, None], 2) for each in pairs.unbind(-1))
        along = self.spectrum.left.mT @ _centre(first * second)  # (B, M, T)
        one, two = pairs.unbind(-1)
        before = self.spread[one, one] * self.spread[two, two] + self.spread[one, two].square()  # variance without data
        inverse, squares = self._inverse(), self.spectrum.sizes.square()
        probabilities, strengths = self.posterior.probabilities, self.posterior.strengths
        kept = inverse * (2 - squares[:, None] * inverse)
        unknown = (before[:, None] - kept @ along.square()) / strengths[:, None]  # (B, K, T)
        of_strengths = (strengths[:, None] * inverse * self.seen.square()[:, None]).sum(-1)  # (B, K)
        variances = of_strengths / variance_divisor(self.posterior.freedom)[:, None]
        fits = (inverse * self.seen[:, None]) @ along  # (B, K, T)
        mean = (probabilities[..., None] * fits).sum(1, keepdim=True)
        unknown = variances[..., None] * unknown.clamp(min=0) + (fits - mean).square()
        missed = (probabilities[..., None] * strengths[:, None] * inverse).sum(1) * self.seen
        residuals = (self.spectrum.left @ missed[..., None])[..., 0].square() / (1 - self.leverages).clamp(min=TINY)
        spared = (self.posterior.freedom / variance_divisor(self.posterior.freedom))[:, None]
        influence = self.spectrum.left @ ((probabilities[..., None] * inverse).sum(1)[..., None] * along)
        noise = ((residuals * spared)[..., None] * influence.square()).sum(1)
        return 4 * ((probabilities[..., None] * unknown).sum(1) + noise).sqrt()

    def _inverse(self) -> Tensor:
        """1 / (s² + λ) for each strength and singular value, (B, K, M)."""
        return 1 / (self.spectrum.sizes.square()[:, None] + self.posterior.strengths[:, None])


def fit_interactions(keep: Tensor, sums: Tensor, shape: tuple[int, int], side: int) -> SecondOrder:
    """Fit (v(S) + v(S̄)) / 2 ≈ φ_∅ + Σ_{z < w} φ_zw s_z s_w, where s_z is 1 for z ∈ S and −1 for all others.

    First-order terms are odd, and cancel in the sum over a coalition S and its complement S̄. φ_zw is a coefficient of
    the best second-order approximation of v over the drawn coalitions; 4 φ_zw is how much more z adds to v(S) if S has
    w. If all coalitions are equally likely, that is the Banzhaf interaction index (Grabisch and Roubens, 1999; Tsai et
    al., 2023, Faith-Banzhaf). The interaction of two cells, 4 Σ φ_zw over z of one and w of the other, is then how much
    more one cell adds if the other is visible: above 0, they need each other; below 0, each does what the other does.

    There are more φ_zw than pairs of coalitions. Ridge regression towards 0 determines them, all strengths λ being
    averaged as in `compute_posterior`. Neighbours are expected to interact alike: the prior covariance of φ_zw and
    φ_z'w' is Q_zz' Q_ww' + Q_zw' Q_wz', where Q falls with the distance, see `SMOOTH`. So two coalitions s and s' of
    patches have the covariance (sᵀ Q s')² / 2, up to a constant, and no matrix of all pairs of patches is needed.

    Args:
        keep: one coalition S of each pair, boolean (B, M, N).
        sums: v(S) + v(S̄), (B, M).
        shape: rows and columns of patches.
        side: patches along a side of the cells; the last ones may be smaller.
    """
    with torch.autocast(keep.device.type, enabled=False):
        signs = 2 * to_float64(keep) - 1
        smoothing, cells = (
            torch.kron(along_rows, along_columns)
            for along_rows, along_columns in zip(*(_along(length, side, signs) for length in shape), strict=True)
        )
        kernel = (signs @ smoothing @ signs.mT).square() / 2
        squares, left = torch.linalg.eigh(_centre(_centre(kernel).mT))
        spectrum = Spectrum(left, (squares * (squares > TINY * squares[:, -1:])).sqrt())
        seen = (left.mT @ _centre(to_float64(sums)[..., None] / 2))[..., 0]
        nothing = torch.zeros_like(seen)
        freedom = torch.full_like(seen[:, 0], keep.shape[1] - 1)
        unit = math.prod(shape) ** 2 // 2
        posterior = compute_posterior(spectrum, unit, seen, nothing, nothing[:, 0], freedom)
        leverages = 1 / keep.shape[1] + compute_leverages(spectrum, posterior, nothing)
        members = signs @ smoothing @ cells
        return SecondOrder(members, cells.mT @ smoothing @ cells, spectrum, seen, posterior, leverages)


def strongest(fitted: SecondOrder, shape: tuple[int, int], side: int, top: int) -> Interactions:
    """The `top` pairs of cells with the largest absolute interactions, or all if there are fewer."""
    cells = -(-shape[0] // side), -(-shape[1] // side)
    values = fitted.values
    first, second = torch.triu_indices(values.shape[1], values.shape[2], offset=1, device=values.device)
    values = values[:, first, second]
    best = values.abs().topk(min(top, len(first)), -1).indices
    pairs = torch.stack([first[best], second[best]], -1)
    return Interactions(pairs, values.take_along_dim(best, -1), fitted.errors(pairs), cells)


def _along(length: int, side: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Along one axis of patches: how alike patches are, and which are in each cell, of the type of another tensor."""
    places = torch.arange(length, device=like.device)
    smoothing = (-(to_float64(places[:, None] - places) / SMOOTH).square() / 2).exp()
    return smoothing.to(like), F.one_hot(places // side).to(like)


def _centre(columns: Tensor) -> Tensor:
    """Subtract the mean over the pairs from columns (B, M, C): φ_∅ is fitted without a penalty."""
    return columns - columns.mean(1, keepdim=True)
