"""What is left of the confidence p, the probability of the explained class: ROAD, average drop and increase, ARCC."""

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.masking import select_most_important
from explainers.metrics.perturbation import importance_order
from explainers.models.inputs import WHITE


def road_masks(scores: Tensor, index: Tensor) -> Tensor:
    """Hide 10, 20, ..., 90 % of the patches: the most important first (MoRF), then the least important first (LeRF).

    Both hide ⌊qN/10⌋ patches for q = 1 ... 9, as the authors do: otherwise, random heatmaps would not score 0.

    Of scores (B, N) of images with these indices in the data set (B,), which order ties: visible patches, (B, 18, N).
    """
    order = importance_order(scores, index)
    hidden = [select_most_important(each, levels=11)[:, 1:-1] for each in (order, order.flip(1))]
    return ~torch.cat(hidden, 1)


def road(outputs: Tensor) -> Tensor:
    """Compute ROAD (Rong et al., ICML 2022), the mean of (LeRF − MoRF) / 2 over P shares of hidden patches.

    Of p under masks that hide the most, then the least important patches, (B, 2 P), see `road_masks`: float64, (B,).

    >>> road(torch.tensor([[0.5, 0.25, 1.0, 0.75]])).tolist()
    [0.25]
    """
    morf, lerf = outputs.double().chunk(2, 1)
    return (lerf - morf).mean(1) / 2


def unit_masks(heatmaps: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale heatmaps (B, rows, columns) up to pixels, and to the range 0 to 1 → (B, H, W); equal scores become 0."""
    pixels = F.interpolate(heatmaps[:, None].float(), size, mode="bilinear", align_corners=False)[:, 0]
    pixels = pixels - pixels.amin((1, 2), keepdim=True)
    return pixels / pixels.amax((1, 2), keepdim=True).clamp(min=torch.finfo(pixels.dtype).tiny)


def fade(images: Tensor, masks: Tensor, mean: Tensor) -> Tensor:
    """Multiply normalised images with masks (B, H, W), but take and return them as integers (B, C, H, W).

    Where the mask is 0, they have the `mean` pixel of the model, (C, 1, 1) from 0 to 1.
    """
    background = mean * WHITE[images.dtype]
    return (background + masks[:, None] * (images.float() - background)).round().to(images.dtype)


def average_drop(whole: Tensor, faded: Tensor) -> Tensor:
    """Compute max(0, p − p') / p, where p' is of the image times its mask (Grad-CAM++, Section 5.1.1): (B,)."""
    return (whole - faded).double().clamp(min=0) / whole


def arcc(masks: Tensor, again: Tensor, outputs: Tensor) -> Tensor:
    """Compute ARCC, the harmonic mean of coherency, 1 − complexity and ROAD (Domeniconi et al., 2026, 2605.14641).

    With Pearson's ρ of the mask and the mask of the faded image, the coherency is (1 + ρ) / 2. The complexity is the
    mean of the mask. ROAD is LeRF − MoRF of 20, 40, 60 and 80 %, or 0 where it is negative.

    Args:
        masks: `unit_masks` of the images, (B, H, W).
        again: those of the images that are faded by them; of a constant mask, ρ is 0.
        outputs: p under `road_masks`, (B, 18).

    Returns:
        float64, (B,), from 0 to 1.
    """
    first, second = ((each - each.mean((1, 2), keepdim=True)).flatten(1).double() for each in (masks, again))
    coherency = (1 + F.cosine_similarity(first, second)) / 2
    difference = 2 * road(outputs.unflatten(1, (2, -1))[..., 1::2].flatten(1))
    parts = torch.stack([coherency, 1 - masks.double().mean((1, 2)), difference.clamp(0, 1)])
    return len(parts) / (1 / parts).sum(0)
