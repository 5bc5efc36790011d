"""Figures of many explainers and of several numbers at once: rankings and radar plots."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from explainers.errors import InputError
from explainers.report.figures import SIDES, require
from explainers.report.labels import colours_of, direction, legend_below, names_in, title_of
from explainers.results.reading import COSTS, Results

SAFE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
"""Colours that people with any colour vision can tell apart (Okabe and Ito, 2008)."""

MARKERS = "osD^vP*X"
CENTRE = 0.25
"""Radius of the lowest value in a radar plot; at 0 all axes would share a point."""


def ranking(results: Results, titles: Mapping[str, str] | None = None, numbers: Sequence[str] | None = None) -> Figure:
    """Numbers of many explainers, with standard errors where they are known; the best of the first number on top.

    The figure has one row per task and one column per number. The dotted line is the value of `chance`. Without
    `numbers`, both fidelities share one column, if all explainers have them; otherwise the first two numbers with an
    arrow in their titles are drawn.

    Args:
        results: task → explainer → numbers.
        titles: number → column title, with an arrow towards better values; by default the numbers' names.
        numbers: the numbers to draw, such as [deletion, insertion].
    """
    require(results)
    titles = titles or {}
    rows = [row for explainers in results.values() for row in explainers.values()]
    if numbers is None and all(SIDES.keys() <= row.keys() for row in rows):
        return _fidelity_ranking(results)
    numbers = list(numbers or _with_arrows(rows, titles)[:2] or SIDES)
    require(results, *numbers)
    heights = [0.5 + 0.19 * len(explainers) for explainers in results.values()]
    size = 1.6 + 2.8 * len(numbers), 0.4 + sum(heights)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(results), len(numbers), squeeze=False, sharey="row", height_ratios=heights)
    for row, (task, explainers) in zip(axes, results.items(), strict=True):
        sign = direction(titles.get(numbers[0], "")) or 1
        values = {name: sign * numbers_of[numbers[0]] for name, numbers_of in explainers.items()}
        names = sorted(values, key=values.__getitem__)
        for axis, number, colour in zip(row, numbers, colours_of(numbers).values(), strict=True):
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
    colours = colours_of(SIDES)
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
    axis.set_yticks(range(len(names)), [title_of(name) for name in names], fontsize=8)
    axis.set_ylim(-0.7, len(names) - 0.3)


def radar(
    results: Results,
    titles: Mapping[str, str],
    numbers: Sequence[str] | None = None,
    explainers: Sequence[str] | None = None,
) -> Figure:
    """Several numbers of each explainer on the axes of a circle (SkipPLUS, Figure 4): one panel per task.

    Each axis runs from the worst value of the drawn explainers, on the inner circle, to the best, on the outer one; its
    label has both. Numbers of which lower values are better are flipped. So axes compare explainers, not numbers.

    Args:
        results: task → explainer → numbers.
        titles: number → column title, with an arrow towards better values.
        numbers: three numbers or more; `None` draws all that have an arrow and all drawn explainers share, but costs.
        explainers: names of the explainers to draw; `None` draws all.

    Raises:
        InputError: for fewer than three numbers, or a number without an arrow.
    """
    known = names_in(results)
    if unknown := [name for name in explainers or () if name not in known]:
        raise InputError(
            f"expected explainers among {', '.join(known)}, got {', '.join(unknown)}: correct figures.radar.explainers"
        )
    chosen = {
        task: {name: row for name, row in measured.items() if name in (explainers or known)}
        for task, measured in results.items()
    }
    rows = [row for measured in chosen.values() for row in measured.values()]
    numbers = list(numbers or _with_arrows(rows, titles))
    require(chosen, *numbers)
    pointless = [number for number in numbers if not direction(titles.get(number, ""))]
    if len(numbers) < 3 or pointless:
        got = f"{', '.join(pointless)} without one" if pointless else ", ".join(numbers) or "none"
        raise InputError(
            f"expected three numbers or more whose titles have an arrow, got {got}: name others with"
            " figures.radar.numbers=[...]"
        )
    names = names_in(chosen)
    angles = np.linspace(0, 2 * np.pi, len(numbers), endpoint=False)
    figure = Figure(figsize=(6.4 * len(chosen), 5.4), layout=ConstrainedLayoutEngine(h_pad=0.12))
    axes = figure.subplots(1, len(chosen), squeeze=False, subplot_kw={"projection": "polar"})[0]
    for axis, (task, measured) in zip(axes, chosen.items(), strict=True):
        ends = {number: _worst_and_best(measured, number, direction(titles[number])) for number in numbers}
        for i, name in enumerate(names):
            if name in measured:
                radii = [_radius(measured[name][number], *ends[number]) for number in numbers]
                style = {"color": SAFE[i % len(SAFE)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
                style |= {"linestyle": ("-", "--", ":")[i // len(SAFE) % 3], "linewidth": 1.4, "clip_on": False}
                axis.plot([*angles, angles[0]], [*radii, radii[0]], label=title_of(name), **style)
        _label_axes(
            axis, angles, [f"{titles[number]}\n{low:#.3g} → {high:#.3g}" for number, (low, high) in ends.items()]
        )
        axis.set_title(task, pad=18, fontsize=11)
    legend_below(figure, axes)
    figure.suptitle("each axis: from the worst explainer (inner circle) to the best (outer circle)", fontsize=9)
    return figure


def _with_arrows(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> list[str]:
    """The numbers that all explainers have and whose titles say which values are better; costs are left out."""
    shared = [number for number in titles if all(number in row for row in rows)]
    return [number for number in shared if direction(titles[number]) and number not in COSTS]


def _worst_and_best(measured: Mapping[str, Any], number: str, sign: int) -> tuple[float, float]:
    values = sorted((row[number] for row in measured.values()), key=lambda value: sign * value)
    return values[0], values[-1]


def _radius(value: float, worst: float, best: float) -> float:
    """Where a value is between the inner and the outer circle; equal values are all the best."""
    share = (value - worst) / (best - worst) if best != worst else 1.0
    return CENTRE + (1 - CENTRE) * share


def _label_axes(axis: Any, angles: np.ndarray, labels: list[str]) -> None:
    """Write the labels around the circle, away from it, and leave out the numbers of radii."""
    axis.set_theta_offset(np.pi / 2)  # the first axis on top
    axis.set_theta_direction(-1)
    axis.set_ylim(0, 1)
    axis.set_yticks([CENTRE, 1], ["", ""])
    axis.set_xticks(angles, labels, fontsize=9)
    axis.tick_params(axis="x", pad=10)
    for angle, label in zip(angles, axis.get_xticklabels(), strict=True):
        side = math.sin(angle)
        label.set_horizontalalignment("center" if abs(side) < 0.1 else "left" if side > 0 else "right")
    axis.grid(alpha=0.4)
