"""Figures of results.json files; rankings are in `rankings`, those of training runs and benchmarks in `run_figures`."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from explainers.errors import InputError
from explainers.metrics.curves import CURVES
from explainers.report.labels import colours_of, legend_below, logarithmic, names_in, title_of
from explainers.results.reading import Results

SIDES = {"fidelity_plus": "Fidelity⁺  (higher is better)", "fidelity_minus": "Fidelity⁻  (lower is better)"}


def fidelity_curves(results: Results) -> Figure:
    """Fidelity⁺ and Fidelity⁻ against sparsity (TVE, Figure 12): one column per task, one line per explainer.

    If they were not measured, the curves that all explainers have are drawn.
    """
    sides = _sides(results, "_curve")
    figure = Figure(figsize=(1 + 3.2 * len(results), 3.1 * len(sides)), layout="constrained")
    axes = figure.subplots(len(sides), len(results), squeeze=False, sharex=True, sharey="row")
    colours = colours_of(names_in(results))
    for column, (task, explainers) in enumerate(results.items()):
        for axis, side in zip(axes[:, column], sides, strict=True):
            for name, numbers in explainers.items():
                label = title_of(name)
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


def quality_against_passes(results: Results, passes: Mapping[str, int], one: Sequence[str]) -> Figure:
    """Agreement with the reference against the number of forward passes per image: one column per task.

    The rows are the error relative to the reference's spread, ρ, and IoU@K where all explainers have it.

    Args:
        results: task → explainer → numbers.
        passes: explainer → number of forward passes; these explainers form one line.
        one: explainers with a single forward pass, one point each.
    """
    sides = {"relative_error": "error / spread  (lower is better)", "rank_correlation": "ρ with the reference"}
    wanted = [*passes, *one]
    measured = [explainers.get(name, {}) for explainers in results.values() for name in wanted]
    overlaps = [name for name in (measured or [{}])[0] if re.fullmatch(r"iou_\d+", name)]
    sides |= {name: f"IoU@{name[4:]} with the reference" for name in overlaps if all(name in row for row in measured)}
    require({task: {name: measured.get(name, {}) for name in wanted} for task, measured in results.items()}, *sides)
    figure = Figure(figsize=(1 + 3 * len(results), 3 * len(sides)), layout="constrained")
    axes = figure.subplots(len(sides), len(results), squeeze=False, sharex=True, sharey="row")
    colours = colours_of(["line", *one])
    for column, (task, explainers) in enumerate(results.items()):
        for axis, side in zip(axes[:, column], sides, strict=True):
            counts = sorted(passes, key=lambda name: passes[name])
            line = [explainers[name][side] for name in counts]
            axis.plot([passes[name] for name in counts], line, marker=".", color=colours["line"], label="KernelSHAP")
            for name in one:
                axis.plot(1, explainers[name][side], "o", color=colours[name], label=title_of(name))
                axis.axhline(explainers[name][side], color=colours[name], linewidth=0.8, linestyle=":")
            logarithmic(axis, "x")
            axis.grid(alpha=0.3)
        logarithmic(axes[0, column], "y")  # heatmaps in other units have errors many times as large
        axes[0, column].set_title(task)
        axes[-1, column].set_xlabel("forward passes an image")
    for axis, label in zip(axes[:, 0], sides.values(), strict=True):
        axis.set_ylabel(label)
    legend_below(figure, axes.flat)
    return figure


def fidelity_against_speed(results: Results) -> Figure:
    """Fidelity⁺ against explained images per second (TVE, Figure 1): one column per task, one point per explainer."""
    require(results, "fidelity_plus", "images_per_second")
    figure = Figure(figsize=(1 + 3.2 * len(results), 3.6), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    colours = colours_of(names_in(results))
    for axis, (task, explainers) in zip(axes, results.items(), strict=True):
        for name, numbers in explainers.items():
            place = numbers["images_per_second"], numbers["fidelity_plus"]
            axis.errorbar(
                *place, numbers.get("fidelity_plus_error"), fmt="o", color=colours[name], label=title_of(name)
            )
        logarithmic(axis, "x")
        axis.grid(alpha=0.3)
        axis.set_title(task)
        axis.set_xlabel("images per second")
    axes[0].set_ylabel(SIDES["fidelity_plus"])
    legend_below(figure, axes)
    return figure


def ablation_bars(results: Results, explainers: Sequence[str] | None = None) -> Figure:
    """Fidelities averaged over the tasks (TVE, Figure 5), with the standard errors of the averages where all are known.

    Args:
        results: task → explainer → numbers.
        explainers: names of the explainers to draw, in this order; `None` draws all.

    Raises:
        InputError: if an explainer was not measured on every task, because averages over different tasks are not
            comparable.
    """
    require(results, *SIDES)
    names = list(explainers or names_in(results))
    missing = [f"{name} on {task}" for task, measured in results.items() for name in names if name not in measured]
    if missing:
        raise InputError(
            f"expected all explainers on all tasks, got no {', '.join(missing)}: measure or leave them out"
        )
    colours = colours_of(names_in(results))
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


def approximation_scatter(results: Results, explainer: str = "two_point") -> Figure:
    """The expectation of Equation 2 against an attribution that approximates it (TVE, Figure 8): one point per patch.

    The figure has one row per task and one column per number of sampled subsets. The titles show the correlations.

    Args:
        results: task → attribution → numbers of a `TwoPointStudy`.
        explainer: name of the attribution; `two_point` is Equation 3.
    """
    chosen = {task: {explainer: measured[explainer]} for task, measured in results.items() if explainer in measured}
    require(chosen, "attribution", "subsets")
    counts = next(iter(chosen.values()))[explainer]["subsets"]
    figure = Figure(figsize=(1 + 3.8 * len(counts), 0.4 + 3.6 * len(chosen)), layout="constrained")
    axes = figure.subplots(len(chosen), len(counts), squeeze=False, sharex="row", sharey="row")
    for row, (task, measured) in zip(axes, chosen.items(), strict=True):
        numbers = measured[explainer]
        for axis, count in zip(row, counts, strict=True):
            axis.scatter(numbers["attribution"], numbers[f"expectation_{count}"], s=12, alpha=0.5, linewidths=0)
            pearson, spearman = (numbers.get(f"{name}_{count}", math.nan) for name in ("pearson", "spearman"))
            axis.set_title(f"{task}, {count} subsets: r = {pearson:.2f}, ρ = {spearman:.2f}", fontsize=10)
            axis.set_xlabel(
                "B ∈ {everything else, nothing} (Eq. 3)" if explainer == "two_point" else title_of(explainer)
            )
            axis.grid(alpha=0.3)
        row[0].set_ylabel("B of sampled subsets (Eq. 2)")
    return figure


def _bars(
    axis: Axes,
    names: Sequence[str],
    heights: Mapping[str, float],
    errors: Sequence[float],
    colours: Mapping[str, Any] | None = None,
) -> None:
    """Draw a bar with its error at the position of each name; a name without a height leaves its position empty."""
    colours = colours or colours_of(names)
    positions = [names.index(name) for name in heights]
    bar_colours = [colours[name] for name in heights]
    error_style = {"elinewidth": 1, "capsize": 2}
    axis.bar(positions, list(heights.values()), 0.75, yerr=errors, color=bar_colours, error_kw=error_style)
    axis.axhline(0, color="black", linewidth=0.8)
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(
        range(len(names)),
        [title_of(name) for name in names],
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
