"""The figure of the first layer that PLUS sums."""

import math
import re
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from explainers.errors import InputError
from explainers.metrics.curves import CURVES
from explainers.metrics.localization import LOCALIZATIONS
from explainers.report.labels import choose_colours, legend_below, make_title
from explainers.report.results import Results

TITLES = {name: shape.title for name, shape in CURVES.items()} | {
    number: title for metric in LOCALIZATIONS.values() for number, title in metric.columns.items()
}
"""Number in results → its title, for all numbers that are drawn."""

ByStart = dict[str, dict[int, Mapping[str, Any]]]
"""Method → first layer → numbers."""


def cutoff_curves(results: Results, layers: int | None = None) -> Figure:
    """Faithfulness and localization against the first layer of PLUS (SkipPLUS, Figure 7), with standard errors.

    One column per task, one row per number that all its methods have, one line per method. Dotted lines mark layer 0,
    which is PLUS, and the middle layer ⌈L/2⌉, which is SkipPLUS.

    Args:
        results: task → explainer → numbers; explainers such as `DecompX-PLUS(start=3)` are drawn.
        layers: L, the number of layers of the model; `None`: the last first layer + 1.

    Raises:
        InputError: if no explainer has an option `start`.
    """
    tasks = {task: starts for task, explainers in results.items() if (starts := by_start(explainers))}
    rows = [numbers for methods in tasks.values() for starts in methods.values() for numbers in starts.values()]
    drawn = [name for name in TITLES if rows and all(name in numbers for numbers in rows)]
    if not drawn:
        raise InputError(
            "nothing to draw: expected explainers such as DecompX-PLUS(start=3), got"
            f" {', '.join(name for measured in results.values() for name in measured) or 'none'}: measure"
            " methods=[{DecompX-PLUS:{start:[0,3,6,9]}}]"
        )
    size = 1 + 4 * len(tasks), 0.6 + 2 * len(drawn)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(drawn), len(tasks), squeeze=False, sharex="col", sharey="row")
    colours = choose_colours(dict.fromkeys(method for methods in tasks.values() for method in methods))
    for column, (task, methods) in enumerate(tasks.items()):
        depth = layers or 1 + max(start for starts in methods.values() for start in starts)
        for axis, name in zip(axes[:, column], drawn, strict=True):
            _draw(axis, name, methods, colours)
            for position in (0, math.ceil(depth / 2)):
                axis.axvline(position, color="black", linewidth=0.8, linestyle=":")
        axes[0, column].set_title(task)
        axes[-1, column].set_xlabel("first layer that is summed")
        axes[-1, column].set_xticks([0, math.ceil(depth / 2), depth - 1], ["0\nPLUS", "L/2\nSkipPLUS", str(depth - 1)])
    for axis, name in zip(axes[:, 0], drawn, strict=True):
        axis.set_ylabel(TITLES[name])
    legend_below(figure, axes.flat)
    return figure


def by_start(explainers: Mapping[str, Mapping[str, Any]]) -> ByStart:
    """Group the explainers that have an option `start`, in ascending order.

    >>> by_start({"DecompX-PLUS(start=3)": {"ap": 0.6}, "DecompX-PLUS(start=0)": {"ap": 0.5}, "GAE": {"ap": 0.4}})
    {'DecompX-PLUS': {0: {'ap': 0.5}, 3: {'ap': 0.6}}}
    """
    by_method: ByStart = {}
    for label, numbers in explainers.items():
        if match := re.fullmatch(r"(.+)\((.*, )?start=(\d+)(, .*)?\)", label):
            name, before, start, after = match.groups()
            others = f"{before or ''}{after or ''}".strip(", ").replace(", , ", ", ")
            by_method.setdefault(f"{name}({others})" if others else name, {})[int(start)] = numbers
    return {method: dict(sorted(starts.items())) for method, starts in by_method.items()}


def _draw(axis: Axes, name: str, methods: ByStart, colours: Mapping[str, Any]) -> None:
    """Draw one number of all methods against the first layer."""
    for method, starts in methods.items():
        values = [numbers[name] for numbers in starts.values()]
        errors = [numbers.get(f"{name}_error", math.nan) for numbers in starts.values()]
        style: dict[str, Any] = {
            "marker": ".",
            "color": colours[method],
            "elinewidth": 0.6,
            "label": make_title(method),
        }
        axis.errorbar(list(starts), values, yerr=errors, **style)
    axis.grid(alpha=0.3)
