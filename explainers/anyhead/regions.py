"""Random coalitions of patches that are coherent regions of the image."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.sampling import uniform
from explainers.shapley.coalition_draws import check_coalitions


def region_coalitions(index: Tensor, num_patches: int, count: int, seed: int) -> Tensor:
    """Draw coalitions of a few coherent regions: the patches where a smooth random field is highest.

    The field interpolates independent numbers, one for 2 × 2 patches. So a coalition contains most patches of some
    objects and few of others, and its embedding tells more about objects than the embedding of separate patches.

    Args:
        index: index of each image in the data set, (B,).
        num_patches: N, a square number of at least 4.
        count: number of coalitions for each image.
        seed: a different one for every epoch, see `sampling.stream`.

    Returns:
        Boolean, (B, count, N); True for the patches in the coalition. Sizes are uniform in 1 ... N − 1.

    Raises:
        InputError: for a single patch.

    >>> region_coalitions(torch.arange(500), num_patches=9, count=2, seed=0).sum(-1).unique().tolist()
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    check_coalitions(num_patches)
    side = math.isqrt(num_patches)
    cells = math.ceil(math.isqrt(num_patches) / 2) + 3
    draw = torch.arange(cells**2 + 1, device=index.device)
    coalition = index[:, None] * count + torch.arange(count, device=index.device)
    draws = uniform(coalition[..., None] * len(draw) + draw, seed)  # (B, count, cells² + 1)
    coarse = draws[..., 1:].flatten(0, 1).unflatten(-1, (1, cells, cells))
    # The interpolation varies more at its border, which would be drawn first
    field = F.interpolate(coarse, scale_factor=2, mode="bicubic")[..., 3 : 3 + side, 3 : 3 + side]
    field = field.reshape(*coalition.shape, num_patches)
    size = 1 + (draws[..., :1] * (num_patches - 1)).long()
    return field.argsort(-1, descending=True).argsort(-1) < size
