"""A figure with the heatmaps of several images and explainers."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from torch import Tensor

from explainers.report.labels import title_of
from explainers.report.overlays import BLUE, ENDS, GREY, RED, overlay


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

    >>> import torch
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
    stops = [[channel / 255 for channel in colour] for colour in (BLUE, GREY, RED)]
    scale = ScalarMappable(Normalize(-1, 1), LinearSegmentedColormap.from_list("overlay", stops))
    bar = figure.colorbar(scale, ax=axes, location="bottom", shrink=0.5, aspect=40, ticks=[-1, 0, 1])
    bar.ax.set_xticklabels(ENDS, fontsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
