"""Names, colours and legends that tables, figures and the gallery share."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

METHODS = {"anyhead": "AnyHead", "tve": "TVE"}  # method, as configs call it → its name in tables and figures


def make_title(explainer: str) -> str:
    """The name of an explainer in tables, figures and the gallery: its method, then its variant after a hyphen.

    >>> [make_title(name) for name in ("anyhead", "tve_last_block", "vit_shapley")]
    ['AnyHead', 'TVE-last-block', 'vit_shapley']
    """
    method, *variant = explainer.split("_")
    return "-".join([METHODS[method], *variant]) if method in METHODS else explainer


def direction(title: str) -> int:
    """1 if the arrow in a title says that high values are better, −1 for low ones, 0 without an arrow."""
    return ("↑" in title) - ("↓" in title)


def names_in(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of all explainers, each once, in the order of their first appearance."""
    return list(dict.fromkeys(name for explainers in results.values() for name in explainers))


def choose_colours(names: Iterable[str]) -> dict[str, Any]:
    """A colour for each name, by its position: ten saturated colours, then their ten pale variants."""
    palette = matplotlib.colormaps["tab20"]  # alternates saturated and pale colours
    return {name: palette(2 * i % 20 + i // 10 % 2) for i, name in enumerate(names)}


def legend_below(figure: Figure, axes: Iterable[Axes]) -> None:
    """Draw one legend for all panels, below them; for more than three lines of names the figure grows."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    longest = 0.6 + 0.09 * max(map(len, handles), default=0)  # width in inches: the line sample and the letters
    columns = max(1, int(figure.get_figwidth() // longest))
    lines = math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + 0.21 * max(0, lines - 3))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
