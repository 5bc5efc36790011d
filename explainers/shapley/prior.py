"""KernelSHAP's regression with a prior: a cheap heatmap to which the noise of few coalitions shrinks."""

import torch
from torch import Tensor

from explainers.runtime.modes import to_float64

STRENGTHS = 10.0 ** torch.arange(-6, 4.5, 0.5, dtype=torch.double)
"""Ridge strengths to choose from, in units of the largest squared singular value of the regression."""


def fit_with_prior(
    keep: Tensor, values: Tensor, null: Tensor, grand: Tensor, prior: Tensor, paired: bool = True
) -> Tensor:
    """Fit v(S) ≈ v(∅) + Σ_{z ∈ S} φ_z as `fit_shapley`, with ridge towards a prior instead of the pseudo-inverse.

    φ = (v(all) − v(∅)) / N + s π + δ, where π is the prior minus its mean. Least squares choose s ≥ 0 first, then ridge
    fits the remainder δ. For every image and class, the strength with the smallest leave-one-out error is taken. Where
    the prior is good or the coalitions are few, φ stays near the prior; with many coalitions, it becomes the plain fit.

    Args:
        keep: coalitions S that were drawn from the Shapley kernel, boolean (B, M, N).
        values: v(S), (B, M, K).
        null: v(∅), of no patch, (B, K).
        grand: v(all), of all patches, (B, K).
        prior: a heatmap of each class, of any size and offset, (B, N, K).
        paired: every second coalition is the complement of the one before it. Only the difference of their values
            depends on φ, so a pair is one observation.

    Returns:
        (B, N, K).
    """
    with torch.autocast(keep.device.type, enabled=False):
        members = to_float64(keep)
        gain = to_float64(values - null[:, None])
        even = to_float64(grand - null)[:, None] / keep.shape[-1]  # (B, 1, K)
        sizes = members.sum(-1, keepdim=True)
        members = members - sizes / keep.shape[-1]  # so that deviations from `even` sum to 0
        gain = gain - sizes * even
        if paired:
            pairs = keep.shape[1] // 2 * 2
            members = members[:, :pairs:2]
            gain = (gain[:, :pairs:2] - gain[:, 1:pairs:2]) / 2
        shape = to_float64(prior - prior.mean(1, keepdim=True))
        along = members @ shape  # what the prior predicts, (B, M, K)
        size = (along * gain).sum(1, keepdim=True) / along.square().sum(1, keepdim=True).clamp(min=1e-12)
        size = size.clamp(min=0)
        remainder = _ridge(members, gain - size * along)
        return (even + size * shape + remainder).to(values)


def _ridge(members: Tensor, gain: Tensor) -> Tensor:
    """The ridge fit δ of gain (B, M, K) ≈ members (B, M, N) δ whose strength has the least leave-one-out error."""
    u, s, vh = torch.linalg.svd(members, full_matrices=False)  # (B, M, r), (B, r), (B, r, N)
    strengths = STRENGTHS.to(s.device)[:, None] * s[:, None, :1].square()  # (B, strengths, 1)
    kept = s[:, None].square() / (s[:, None].square() + strengths)  # of each direction, (B, strengths, r)
    projected = u.mT @ gain  # (B, r, K)
    errors = gain[:, None] - u[:, None] @ (kept[..., None] * projected[:, None])  # (B, strengths, M, K)
    leverage = kept @ u.square().mT  # (B, strengths, M)
    left_out = (errors / (1 - leverage).clamp(min=1e-6)[..., None]).square().mean(2)  # (B, strengths, K)
    best = left_out.argmin(1)  # (B, K)
    inverse = kept / s[:, None].clamp(min=1e-12)  # (B, strengths, r)
    chosen = inverse.gather(1, best[..., None].expand(-1, -1, s.shape[-1])).mT  # (B, r, K)
    return vh.mT @ (chosen * projected)
