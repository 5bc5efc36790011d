"""A radar plot: several numbers of each explainer on the axes of a circle (SkipPLUS, Figure 4)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.papers.figures import numbers_with_arrows, require
from explainers.errors import InputError
from explainers.report.labels import direction, legend_below, make_title, names_in
from explainers.report.results import Results

SAFE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
"""Colours that people with any colour vision can tell apart (Okabe and Ito, 2008)."""

MARKERS = "osD^vP*X"
CENTRE = 0.25
"""Radius of the lowest value in a radar plot; at 0 all axes would share a point."""


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
    if unknown := set(explainers or ()) - set(names_in(results)):
        raise InputError(
            f"expected explainers with results, got {', '.join(unknown)}: correct figures.radar.explainers"
        )
    chosen = {
        task: {name: row for name, row in measured.items() if name in (explainers or measured)}
        for task, measured in results.items()
    }
    rows = [row for measured in chosen.values() for row in measured.values()]
    numbers = list(numbers or numbers_with_arrows(rows, titles))
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
        ends = {}
        for number in numbers:
            values = sorted(row[number] for row in measured.values())
            ends[number] = (values[0], values[-1]) if direction(titles[number]) > 0 else (values[-1], values[0])
        for i, name in enumerate(names):
            if name in measured:
                radii = [_radius(measured[name][number], *ends[number]) for number in numbers]
                style = {"color": SAFE[i % len(SAFE)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
                style |= {"linestyle": ("-", "--", ":")[i // len(SAFE) % 3], "linewidth": 1.4, "clip_on": False}
                axis.plot([*angles, angles[0]], [*radii, radii[0]], label=make_title(name), **style)
        _label_axes(
            axis, angles, [f"{titles[number]}\n{low:#.3g} → {high:#.3g}" for number, (low, high) in ends.items()]
        )
        axis.set_title(task, pad=18, fontsize=11)
    legend_below(figure, axes)
    figure.suptitle("each axis: from the worst explainer (inner circle) to the best (outer circle)", fontsize=9)
    return figure


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
