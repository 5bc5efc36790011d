"""Noisy linear imputation: hidden pixels as weighted means of their neighbours (ROAD, Rong et al., ICML 2022)."""

import torch
from torch import Tensor
from torch.nn import functional as F

TOLERANCE = 1e-4
"""Root mean square over hidden pixels of the last change, in units of normalised pixels."""


@torch.no_grad()
def impute(images: Tensor, visible: Tensor, noise: float = 0.01) -> Tensor:
    """Solve x_i = Σ_j w_ij x_j / Σ_j w_ij for all hidden pixels i, over the pixels j around them that exist.

    The weights are 1/6 for direct and 1/12 for diagonal neighbours. Conjugate gradients with a multigrid cycle as
    preconditioner solve the equations; each channel stops on its own. Then hidden pixels get normal noise, the same for
    every image: without it, a model could see the shape of the mask.

    Args:
        images: normalised images, (B, C, H, W).
        visible: boolean, (B, 1, H, W). Where nothing is visible, the solution is 0.
        noise: standard deviation of the noise; by default as in the authors' code.

    Returns:
        (B, C, H, W), float32.
    """
    hidden = (~visible).float()
    x = torch.where(visible, images, 0).float()
    residual = hidden * _weigh_neighbours(x)
    direction = _cycle(residual, hidden)
    product, tiny = _sum(residual * direction), torch.finfo(x.dtype).tiny
    active = product > tiny
    while active.any():
        image = _left_side(direction, hidden)
        step = torch.where(active, product / _sum(direction * image).clamp(min=tiny), 0)
        x = x + step * direction
        active = active & (step.square() * _sum(direction.square()) > TOLERANCE**2 * _sum(hidden))
        residual = residual - step * image
        cycled, previous = _cycle(residual, hidden), product
        product = _sum(residual * cycled)
        direction = cycled + product / previous.clamp(min=tiny) * direction
    drawn = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return x + hidden * noise * drawn.to(x)


def _sum(x: Tensor) -> Tensor:
    return x.sum((-1, -2), keepdim=True)


def _weigh_neighbours(x: Tensor) -> Tensor:
    """Compute Σ_j w_ij x_j over the neighbours of each pixel of (B, C, H, W) that exist."""
    around = F.pad(x, (1, 1, 1, 1))
    rows = around[..., :-2, :] + 2 * around[..., 1:-1, :] + around[..., 2:, :]
    return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:] - 4 * x) / 12


def _left_side(x: Tensor, hidden: Tensor) -> Tensor:
    """Compute Σ_j w_ij (x_i − x_j) at hidden pixels, of x that is 0 elsewhere."""
    return hidden * (_weigh_neighbours(torch.ones_like(x[:1])) * x - _weigh_neighbours(x))


def _cycle(residual: Tensor, hidden: Tensor) -> Tensor:
    """Solve the equations roughly: smooth, correct the solution by one of half the size, and smooth."""
    scale = 0.8 * hidden / _weigh_neighbours(torch.ones_like(hidden[:1]))
    x = scale * residual
    if min(x.shape[-2:]) >= 4 and x.shape[-2] % 2 == x.shape[-1] % 2 == 0:
        coarse = -F.max_pool2d(-hidden, 2)
        left = residual - _left_side(x, hidden)
        x = x + hidden * _double(_double(_cycle(coarse * _halve(_halve(left).mT).mT, coarse)).mT).mT
    return x + scale * (residual - _left_side(x, hidden))


def _double(x: Tensor) -> Tensor:
    """Interpolate columns (..., W) linearly → (..., 2 W); beyond the border are zeros."""
    around = F.pad(x, (1, 1))
    return torch.stack([0.75 * x + 0.25 * around[..., :-2], 0.75 * x + 0.25 * around[..., 2:]], -1).flatten(-2)


def _halve(x: Tensor) -> Tensor:
    """The transposed map of `_double`: (..., 2 W) → (..., W)."""
    around = F.pad(x, (1, 1))
    return 0.75 * (x[..., ::2] + x[..., 1::2]) + 0.25 * (around[..., :-2:2] + around[..., 3::2])
