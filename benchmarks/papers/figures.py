"""Figures of TVE from results.json files, and a ranking of many explainers; configs/names/figures.yaml names them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from explainers.errors import InputError
from explainers.metrics.curves import CURVES
from explainers.report.labels import (
    choose_colours,
    direction,
    legend_below,
    make_title,
    names_in,
)
from explainers.report.results import COSTS, Results

SIDES = {"fidelity_plus": "Fidelity⁺  (higher is better)", "fidelity_minus": "Fidelity⁻  (lower is better)"}


def fidelity_curves(results: Results) -> Figure:
    """Fidelity⁺ and Fidelity⁻ against sparsity (TVE, Figure 12): one column per task, one line per explainer.

    If they were not measured, the curves that all explainers have are drawn.
    """
    sides = _sides(results, "_curve")
    figure = Figure(figsize=(1 + 3.2 * len(results), 3.1 * len(sides)), layout="constrained")
    axes = figure.subplots(len(sides), len(results), squeeze=False, sharex=True, sharey="row")
    colours = choose_colours(names_in(results))
    for column, (task, explainers) in enumerate(results.items()):
        for axis, side in zip(axes[:, column], sides, strict=True):
            for name, numbers in explainers.items():
                label = make_title(name)
                axis.plot(numbers["sparsity"], numbers[f"{side}_curve"], color=colours[name], label=label)
            axis.grid(alpha=0.3)
        axes[0, column].set_title(task)
        axes[-1, column].set_xlabel("sparsity |S*| / N")
    for axis, label in zip(axes[:, 0], sides.values(), strict=True):
        axis.set_ylabel(label)
    legend_below(figure, axes.flat)
    return figure


def fidelity_bars(results: Results) -> Figure:
    """The areas under the fidelity curves (TVE, Figure 3), with standard errors where they are known.

    Fidelity⁺ is above, Fidelity⁻ below. If they were not measured, the curves that all explainers have are drawn.
    """
    sides, names = _sides(results), names_in(results)
    width, height = 1 + max(2.4, 0.6 + 0.32 * len(names)) * len(results), 2.5 * len(sides) + 0.08 * max(map(len, names))
    figure = Figure(figsize=(width, height), layout="constrained")  # names are written below the bars
    axes = figure.subplots(len(sides), len(results), squeeze=False, sharex=True, sharey="row")
    for column, (task, explainers) in enumerate(results.items()):
        for axis, side in zip(axes[:, column], sides, strict=True):
            measured = {name: explainers[name] for name in names if name in explainers}
            errors = [numbers.get(f"{side}_error", math.nan) for numbers in measured.values()]
            _bars(axis, names, {name: numbers[side] for name, numbers in measured.items()}, errors)
        axes[0, column].set_title(task)
    for axis, label in zip(axes[:, 0], sides.values(), strict=True):
        axis.set_ylabel(label)
    return figure


def fidelity_against_speed(results: Results) -> Figure:
    """Fidelity⁺ against explained images per second (TVE, Figure 1): one column per task, one point per explainer."""
    require(results, "fidelity_plus", "images_per_second")
    figure = Figure(figsize=(1 + 3.2 * len(results), 3.6), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    colours = choose_colours(names_in(results))
    for axis, (task, explainers) in zip(axes, results.items(), strict=True):
        for name, numbers in explainers.items():
            place = numbers["images_per_second"], numbers["fidelity_plus"]
            axis.errorbar(
                *place, numbers.get("fidelity_plus_error"), fmt="o", color=colours[name], label=make_title(name)
            )
        scale_logarithmically(axis, "x")
        axis.grid(alpha=0.3)
        axis.set_title(task)
        axis.set_xlabel("images per second")
    axes[0].set_ylabel(SIDES["fidelity_plus"])
    legend_below(figure, axes)
    return figure


def ablation_bars(results: Results, explainers: Sequence[str] | None = None) -> Figure:
    """Fidelities averaged over the tasks (TVE, Figure 5), with the standard errors of the averages where all are known.

    `explainers` names those to draw, in this order; `None` draws all.

    Raises:
        InputError: if an explainer was not measured on every task.
    """
    require(results, *SIDES)
    names = list(explainers or names_in(results))
    missing = [f"{name} on {task}" for task, measured in results.items() for name in names if name not in measured]
    if missing:
        raise InputError(
            f"expected all explainers on all tasks, got no {', '.join(missing)}: measure or leave them out"
        )
    colours = choose_colours(names_in(results))
    height = 3 + 0.08 * max(map(len, names))  # names are written below the bars
    figure = Figure(figsize=(2.4 + 0.9 * len(names), height), layout="constrained")
    for axis, (side, label) in zip(figure.subplots(1, 2), SIDES.items(), strict=True):
        means = {name: float(np.mean([measured[name][side] for measured in results.values()])) for name in names}
        errors = [
            math.hypot(*(measured[name].get(f"{side}_error", math.nan) for measured in results.values())) / len(results)
            for name in names
        ]
        _bars(axis, names, means, errors, colours)
        axis.set_ylabel(label)
    figure.suptitle(f"mean of {', '.join(results)}", fontsize=10)
    return figure


def ranking(results: Results, titles: Mapping[str, str] | None = None, numbers: Sequence[str] | None = None) -> Figure:
    """Numbers of many explainers, with standard errors where they are known; the best of the first number on top.

    The figure has one row per task and one column per number. The dotted line is the value of `chance`. Without
    `numbers`, both fidelities share one column, if all explainers have them; otherwise the first two numbers with an
    arrow in their titles are drawn.

    Args:
        results: task → explainer → numbers.
        titles: number → column title, with an arrow towards better values; by default its name.
        numbers: the numbers to draw, such as [deletion, insertion].
    """
    require(results)
    titles = titles or {}
    rows = [row for explainers in results.values() for row in explainers.values()]
    if numbers is None and all(SIDES.keys() <= row.keys() for row in rows):
        return _fidelity_ranking(results)
    numbers = list(numbers or numbers_with_arrows(rows, titles)[:2] or SIDES)
    require(results, *numbers)
    heights = [0.5 + 0.19 * len(explainers) for explainers in results.values()]
    size = 1.6 + 2.8 * len(numbers), 0.4 + sum(heights)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(results), len(numbers), squeeze=False, sharey="row", height_ratios=heights)
    for row, (task, explainers) in zip(axes, results.items(), strict=True):
        sign = direction(titles.get(numbers[0], "")) or 1
        values = {name: sign * numbers_of[numbers[0]] for name, numbers_of in explainers.items()}
        names = sorted(values, key=values.__getitem__)
        for axis, number, colour in zip(row, numbers, choose_colours(numbers).values(), strict=True):
            _points(axis, explainers, names, number, colour)
            axis.set_title(titles.get(number, number), fontsize=10)
        _name_rows(row[0], names)
        if len(results) > 1:
            row[0].set_ylabel(task)
    return figure


def _fidelity_ranking(results: Results) -> Figure:
    """Fidelity⁻ and Fidelity⁺, two points each: one column per task, the largest distance on top.

    Their distance, Fidelity⁺ − Fidelity⁻, is near 0 for random heatmaps.
    """
    rows = max(map(len, results.values()))
    figure = Figure(figsize=(1.6 + 4.2 * len(results), 1.2 + 0.19 * rows), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    colours = choose_colours(SIDES)
    for axis, (task, explainers) in zip(axes, results.items(), strict=True):
        distances = {name: row["fidelity_plus"] - row["fidelity_minus"] for name, row in explainers.items()}
        names = sorted(distances, key=distances.__getitem__)
        ends = {side: [explainers[name][side] for name in names] for side in SIDES}
        axis.hlines(range(len(names)), *ends.values(), color="lightgrey", linewidth=3, zorder=0)
        for side, label in SIDES.items():
            _points(axis, explainers, names, side, colours[side], label)
        _name_rows(axis, names)
        axis.set_title(task)
    legend_below(figure, axes)
    return figure


def _points(
    axis: Axes, explainers: Mapping[str, Any], names: list[str], number: str, colour: Any, label: str = ""
) -> None:
    """Draw a number of each explainer with its error, one row each; without a label, also a line at `chance`."""
    errors = [explainers[name].get(f"{number}_error", math.nan) for name in names]
    style = {"fmt": "o", "markersize": 4, "elinewidth": 1, "color": colour, "label": label}
    axis.errorbar([explainers[name][number] for name in names], range(len(names)), xerr=errors, **style)
    if not label and "chance" in explainers:
        axis.axvline(explainers["chance"][number], color="grey", linewidth=1, linestyle=":", zorder=0)
    axis.grid(axis="x", alpha=0.3)


def _name_rows(axis: Axes, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), [make_title(name) for name in names], fontsize=8)
    axis.set_ylim(-0.7, len(names) - 0.3)


def numbers_with_arrows(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> list[str]:
    """The numbers that all explainers have and whose titles say which values are better; costs are left out."""
    shared = [number for number in titles if all(number in row for row in rows)]
    return [number for number in shared if direction(titles[number]) and number not in COSTS]


def _bars(
    axis: Axes,
    names: Sequence[str],
    heights: Mapping[str, float],
    errors: Sequence[float],
    colours: Mapping[str, Any] | None = None,
) -> None:
    """Draw a bar with its error at the position of each name; a name without a height leaves its position empty."""
    colours = colours or choose_colours(names)
    positions = [names.index(name) for name in heights]
    bar_colours = [colours[name] for name in heights]
    error_style = {"elinewidth": 1, "capsize": 2}
    axis.bar(positions, list(heights.values()), 0.75, yerr=errors, color=bar_colours, error_kw=error_style)
    axis.axhline(0, color="black", linewidth=0.8)
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(
        range(len(names)),
        [make_title(name) for name in names],
        fontsize=9,
        **(slanted if len(names) <= 6 else {"rotation": 90}),
    )
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _sides(results: Results, ending: str = "") -> dict[str, str]:
    """Curve → label of each row of a figure: both fidelities, or otherwise all curves that every explainer has."""
    measured = [numbers for explainers in results.values() for numbers in explainers.values()]
    shared = {name: CURVES[name].title for name in CURVES if all(f"{name}{ending}" in row for row in measured)}
    if not measured or not shared:
        require(results, *(f"{side}{ending}" for side in SIDES))
    return SIDES if SIDES.keys() <= shared.keys() else shared


def require(results: Results, *columns: str) -> None:
    """Check that there are results, and that every explainer has these numbers."""
    if not results:
        raise InputError("nothing to draw: name files of results that hold it, results.files=[runs/.../results.json]")
    for task, explainers in results.items():
        for name, numbers in explainers.items():
            missing = [column for column in columns if column not in numbers]
            if missing:
                raise InputError(f"nothing to draw of {name} on {task}: its results hold no {', '.join(missing)}")


class PlainNumbers(LogFormatter):
    """Labels of a logarithmic axis without formulas, which figures that show users' names are drawn without."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The label of a number; empty where there would be too many labels."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def scale_logarithmically(axis: Axes, sides: str) -> None:
    """Scale the sides `x`, `y` or `xy` of a panel logarithmically."""
    for side in sides:
        axis.set(**{f"{side}scale": "log"})
        ticks = axis.xaxis if side == "x" else axis.yaxis
        ticks.set_major_formatter(PlainNumbers())
        ticks.set_minor_formatter(PlainNumbers(minor_thresholds=(1, 0.4)))
