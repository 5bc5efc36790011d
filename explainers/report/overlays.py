"""Heatmaps as colours over images: red supports the class, blue opposes it."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_range
from explainers.report.labels import title_of

RED, BLUE = (220, 20, 40), (20, 60, 220)
"""RGB of the highest and the lowest values."""

SATURATED = 0.05
"""Fraction of patches that have the full colour, so that one outlier does not make all others pale."""


def colour_scale(heatmap: Tensor) -> tuple[float, float]:
    """The median of a heatmap (P, P), which has no colour, and the distance from it that has the full colour.

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


def draw_heatmaps(
    images: Tensor,
    heatmaps: Mapping[str, Tensor],
    truth: Tensor | None = None,
    titles: Sequence[str] | None = None,
) -> Figure:
    """Draw one row per image: the image with the object's outline, then the `overlay` of each explainer's heatmap.

    Each heatmap has its own colour scale, see `colour_scale`.

    Args:
        images: uint8, (B, 3, H, W).
        heatmaps: explainer's name → heatmaps (B, P, P).
        truth: True in the boxes of the object, boolean (B, H, W); `None` draws no outlines.
        titles: label of each row.

    >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    >>> len(draw_heatmaps(images, {"tve": torch.rand(2, 4, 4)}).axes)  # 2 rows of 2 columns, and the colour bar
    5
    """
    columns = ["image", *map(title_of, heatmaps)]
    figure = Figure(figsize=(1.7 * len(columns), 1.8 * len(images) + 0.9))
    figure.set_layout_engine("constrained", h_pad=0.08)  # inches: titles above square panels would be cut
    axes = figure.subplots(len(images), len(columns), squeeze=False)
    for row, image in enumerate(images.cpu()):
        shown = [image, *(overlay(image, heatmap[row]) for heatmap in heatmaps.values())]
        for axis, name, picture in zip(axes[row], columns, shown, strict=True):
            axis.imshow(picture.permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(fill(name, 24), fontsize=9, parse_math=False)  # as many letters as a panel is wide
        if truth is not None:
            outline = truth[row].cpu().float().numpy()
            axes[row, 0].contour(outline, levels=[0.5], colors="lime", linewidths=1)
        if titles is not None:
            axes[row, 0].set_ylabel(fill(titles[row], 24), fontsize=8, parse_math=False)
    _colour_bar(figure, axes)
    return figure


def _colour_bar(figure: Figure, axes: Any) -> None:
    """Explain the colours of `overlay`, below all panels."""
    stops = [[channel / 255 for channel in colour] for colour in (BLUE, (140, 140, 140), RED)]
    scale = ScalarMappable(Normalize(-1, 1), LinearSegmentedColormap.from_list("overlay", stops))
    bar = figure.colorbar(scale, ax=axes, location="bottom", shrink=0.5, aspect=40, ticks=[-1, 0, 1])
    bar.ax.set_xticklabels(["opposes the class", "median", "supports it"], fontsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
