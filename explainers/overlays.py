"""Heatmaps as colours over images: red supports the class, blue opposes it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_range

RED, BLUE = (220, 20, 40), (20, 60, 220)
"""RGB of the highest and the lowest values."""

SATURATED = 0.05
"""Fraction of patches that have the full colour, so that a single outlier does not make all others pale."""


def colour_scale(heatmap: Tensor) -> tuple[float, float]:
    """The value of a heatmap (P, P) that has no colour, its median, and the distance from it that has the full colour.

    >>> colour_scale(torch.tensor([[1.0, 2.0], [3.0, 100.0]]))
    (2.0, 98.0)
    """
    heatmap = heatmap.detach().float().cpu()
    distances = (heatmap - heatmap.median()).abs()
    limit = distances.quantile(1 - SATURATED, interpolation="higher")
    return heatmap.median().item(), limit.item() or distances.max().item() or 1.0


def overlay(image: Tensor, heatmap: Tensor, opacity: float = 0.8) -> Tensor:
    """Lay a heatmap over the grey image: the farther a patch is from the median, the stronger its red or blue.

    Args:
        image: uint8, (3, H, W).
        heatmap: (P, P); higher is more important.
        opacity: opacity of the strongest colours, from 0 to 1.

    Returns:
        uint8, (3, H, W).

    Raises:
        InputError: unless both are of one image.

    >>> image = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    >>> overlay(image, torch.tensor([[0.0, 0.0], [0.0, 1.0]]), opacity=1)[:, 1].tolist()
    [[100, 220], [100, 20], [100, 40]]
    """
    check_range(0, 1, opacity=opacity)
    if image.dim() != 3 or image.dtype != torch.uint8 or heatmap.dim() != 2:
        raise InputError(
            f"expected one uint8 image (3, H, W) and one heatmap (P, P), got {image.dtype} {list(image.shape)} and"
            f" {list(heatmap.shape)}: take one of a batch, as in overlay(images[0], heatmaps[0])"
        )
    centre, limit = colour_scale(heatmap)
    values = ((heatmap.detach().float().cpu() - centre) / limit).clamp(-1, 1)
    values = F.interpolate(values[None, None], image.shape[-2:], mode="nearest")[0]  # (1, H, W)
    grey = image.cpu().float().mean(0, keepdim=True)
    red, blue = (torch.tensor(colour).view(3, 1, 1) for colour in (RED, BLUE))
    strength = opacity * values.abs()
    return (grey + strength * (torch.where(values > 0, red, blue) - grey)).round().to(torch.uint8)
