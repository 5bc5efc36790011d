"""A figure with the heatmaps of several images and explainers."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from torch import Tensor

from explainers.report.labels import make_title
from explainers.report.overlays import colour_scale, ends, legend_colours, overlay


def draw_heatmaps(
    images: Tensor,
    heatmaps: Mapping[str, Tensor],
    truth: Tensor | None = None,
    titles: Sequence[str] | None = None,
    signed: Mapping[str, bool | None] | None = None,
) -> Figure:
    """Draw one row per image: the image with the object's outline, then the `overlay` of each explainer's heatmap.

    Each heatmap has its own `colour_scale`; one without differences between patches says so.

    Args:
        images: uint8, (B, 3, H, W).
        heatmaps: explainer's name → heatmaps (B, rows, columns).
        truth: True in the boxes of the object, boolean (B, H, W); `None` draws no outlines.
        titles: label of each row.
        signed: explainer's name → whether its heatmaps are signed, see `overlay`.

    >>> import torch
    >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    >>> len(draw_heatmaps(images, {"tve": torch.rand(2, 4, 4)}).axes)  # 2 rows of 2 columns, and the colour bar
    5
    """
    columns = ["image", *map(make_title, heatmaps)]
    scales = {
        name: [colour_scale(heatmap, (signed or {}).get(name)) for heatmap in by_image]
        for name, by_image in heatmaps.items()
    }
    bars = sorted({scale.signed for each in scales.values() for scale in each if not scale.constant})
    figure = Figure(figsize=(1.7 * len(columns), 1.8 * len(images) + 0.4 + 0.5 * len(bars)))
    figure.set_layout_engine("constrained", h_pad=0.08)  # inches: titles above square panels would be cut
    axes = figure.subplots(len(images), len(columns), squeeze=False)
    for row, image in enumerate(images.cpu()):
        shown = [image]
        for name, heatmap in heatmaps.items():
            shown.append(overlay(image, heatmap[row], signed=scales[name][row].signed))
            if scales[name][row].constant:
                axes[row, len(shown) - 1].set_xlabel("constant", fontsize=8)
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
    for each in bars:
        _draw_colour_bar(figure, axes, each)
    return figure


def _draw_colour_bar(figure: Figure, axes: Any, signed: bool) -> None:
    """Explain the colours of `overlay`, below all panels."""
    stops = [[channel / 255 for channel in colour] for colour in legend_colours(signed, 65)]
    scale = ScalarMappable(Normalize(0, 1), LinearSegmentedColormap.from_list("overlay", stops))
    words = ends(signed)
    places = [place / (len(words) - 1) for place in range(len(words))]
    pad = 0.12 / figure.get_figheight()  # 0.12 inches, whatever the number of rows
    bar = figure.colorbar(scale, ax=axes, location="bottom", shrink=0.5, aspect=40, pad=pad, ticks=places)
    bar.ax.set_xticklabels(words, fontsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
