"""Figures of metrics that training runs log, of speeds that benchmarks measure, and of agreement against passes."""

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.papers.figures import require, scale_logarithmically
from explainers.errors import InputError, checks_choices
from explainers.metrics.agreement import Agreement
from explainers.report.labels import choose_colours, legend_below, make_title, names_in
from explainers.report.lambda_figure import lambda_curves
from explainers.report.results import Results
from explainers.vectors.lambda_sweep import best_row


def loss_curves(files: Mapping[str, str | Path], window: int = 9) -> Figure:
    """Training losses of several runs (TVE, Figure 4 a and d): pale lines for logged values, solid for running means.

    Args:
        files: label → metrics.csv of a run.
        window: number of logged values in a running mean.
    """
    figure, axis = _single()
    colours = choose_colours(files)
    for label, path in files.items():
        step, loss = _columns(path, "step", "train/loss")
        weight = np.ones(min(window, len(loss)))
        mean = np.convolve(loss, weight, "same") / np.convolve(np.ones(len(loss)), weight, "same")
        axis.plot(step, loss, color=colours[label], alpha=0.25, linewidth=1)
        axis.plot(step, mean, color=colours[label], label=label, marker="o" if len(step) == 1 else None)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss")
    axis.legend(frameon=False)
    return figure


def theorem_1(file: str | Path) -> Figure:
    """Theorem 1 over a run's epochs (metrics.csv): the share of patches with ε ≤ 0.5, their mean |φ̂ − φ|, bound, ε."""
    names = [f"val/theorem1_{name}" for name in ("error", "bound", "epsilon", "covered")]
    epoch, error, bound, epsilon, covered = _columns(file, "epoch", *names)
    figure, axis = _single()
    axis.plot(epoch, error, marker=".", label="explanation error |φ̂ − φ|")
    axis.plot(epoch, bound, marker=".", label="bound 2ε / (1 − ε)")
    axis.plot(epoch, epsilon, marker=".", color="grey", linestyle="--", label="ε")
    label = "share of patches with ε ≤ 0.5 (other curves: mean over these)"
    axis.plot(epoch, covered, marker=".", color="black", label=label)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, fontsize=9)
    return figure


@checks_choices
def lambda_sweeps(files: Mapping[str, str], select: Agreement = "e_rmse") -> Figure:
    """Accuracy and attribution metrics of models with an explainability vector, against λ₂, see `lambda_curves`.

    Args:
        files: label → metrics.csv of a validation of `ExplainabilityVector`, or a pattern (`*`) for those of its jobs.
        select: the metric that chooses among what the jobs have chosen.
    """
    sweeps = {}
    for label, pattern in files.items():
        lines = [line for path in sorted(glob(pattern)) or [pattern] for line in _lines(path, "sweep/lambda_2")]
        keys = {key: key.removeprefix("sweep/") for key in lines[0] if key.startswith("sweep/")}
        rows = sweeps[label] = [{name: float(line[key]) for key, name in keys.items()} for line in lines]
        best = best_row([row for row in rows if row["chosen"]], math.inf, select)
        for row in rows:
            row["chosen"] = row is best
    return lambda_curves(sweeps)


def quality_against_passes(results: Results, passes: Mapping[str, int], one: Sequence[str]) -> Figure:
    """Agreement with the reference against the number of forward passes per image: one column per task.

    The rows are the error relative to the reference's spread, ρ, and IoU@K where all explainers have it.

    The explainers of `passes` form one line; those of `one`, with a single pass, are a point each.
    """
    sides = {"relative_error": "error / spread  (lower is better)", "rank_correlation": "ρ with the reference"}
    wanted = [*passes, *one]
    measured = [explainers.get(name, {}) for explainers in results.values() for name in wanted]
    overlaps = [name for name in (measured or [{}])[0] if re.fullmatch(r"iou_\d+", name)]
    sides |= {name: f"IoU@{name[4:]} with the reference" for name in overlaps if all(name in row for row in measured)}
    require({task: {name: measured.get(name, {}) for name in wanted} for task, measured in results.items()}, *sides)
    figure = Figure(figsize=(1 + 3 * len(results), 3 * len(sides)), layout="constrained")
    axes = figure.subplots(len(sides), len(results), squeeze=False, sharex=True, sharey="row")
    colours = choose_colours(["line", *one])
    for column, (task, explainers) in enumerate(results.items()):
        for axis, side in zip(axes[:, column], sides, strict=True):
            counts = sorted(passes, key=lambda name: passes[name])
            line = [explainers[name][side] for name in counts]
            axis.plot([passes[name] for name in counts], line, marker=".", color=colours["line"], label="KernelSHAP")
            for name in one:
                axis.plot(1, explainers[name][side], "o", color=colours[name], label=make_title(name))
                axis.axhline(explainers[name][side], color=colours[name], linewidth=0.8, linestyle=":")
            scale_logarithmically(axis, "x")
            axis.grid(alpha=0.3)
        scale_logarithmically(axes[0, column], "y")  # heatmaps in other units have errors many times as large
        axes[0, column].set_title(task)
        axes[-1, column].set_xlabel("forward passes an image")
    for axis, label in zip(axes[:, 0], sides.values(), strict=True):
        axis.set_ylabel(label)
    legend_below(figure, axes.flat)
    return figure


def throughput_bars(file: str | Path) -> Figure:
    """Explained images per second (TVE, Figure 6), of `benchmarks/explain.py`: groups are targets, bars are methods."""
    targets = _benchmark(file, "throughput")
    methods = names_in(targets)
    colours, width = choose_colours(methods), 0.8 / len(methods)
    figure = Figure(figsize=(2 + len(targets) * (0.4 + 0.15 * len(methods)), 4), layout="constrained")
    axis = figure.subplots()
    for i, method in enumerate(methods):
        positions = [position for position, speeds in enumerate(targets.values()) if method in speeds]
        heights = [speeds[method] for speeds in targets.values() if method in speeds]
        offset = (i - (len(methods) - 1) / 2) * width
        axis.bar(np.array(positions) + offset, heights, width, color=colours[method], label=make_title(method))
    scale_logarithmically(axis, "y")
    axis.set_ylabel("images per second")
    axis.set_xticks(range(len(targets)), list(targets))
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    legend_below(figure, [axis])
    return figure


def cost_of_tasks(file: str | Path) -> Figure:
    """Seconds to explain an image for T tasks, of `benchmarks/explain.py`: in one forward pass, or in one per task."""
    figure, axis = _single()
    counts: set[int] = set()
    for part, label in (("tasks", "together"), ("tasks_one_by_one", "one by one")):
        seconds = {int(count): cost for count, cost in _benchmark(file, part).items()}
        counts |= seconds.keys()
        axis.plot(sorted(seconds), [seconds[count] for count in sorted(seconds)], marker="o", label=label)
    scale_logarithmically(axis, "xy")
    axis.set_xticks(sorted(counts), [str(count) for count in sorted(counts)])
    axis.minorticks_off()
    axis.set_xlabel("number of tasks T")
    axis.set_ylabel("seconds per image")
    axis.legend(frameon=False)
    return figure


def _single() -> tuple[Figure, Axes]:
    """A figure with one panel."""
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.grid(alpha=0.3)
    return figure, axis


def _columns(path: str | Path, *names: str) -> list[np.ndarray]:
    """Columns of a metrics.csv of Lightning, from the rows that have a value in all of them."""
    return list(np.array([[float(line[name]) for name in names] for line in _lines(path, *names)]).T)


def _lines(path: str | Path, *names: str) -> list[dict[str, str]]:
    """The rows of a metrics.csv of Lightning that have a value in all of some columns."""
    if not Path(path).is_file():
        raise InputError(f"no metrics at {path}: expected the csv/version_0/metrics.csv of a run")
    with open(path, newline="", encoding="utf-8") as file:
        written = file.readlines()
    if written and written[0].endswith("\r\n") and not written[-1].endswith("\n"):
        written.pop()  # the run was killed while it wrote this line
    lines = list(csv.DictReader(written))
    missing = [name for name in names if not lines or name not in lines[0]]
    if missing:
        raise InputError(f"{path}: expected the columns {', '.join(names)}, got no {', '.join(missing)}")
    whole = [line for line in lines if all(line[name] for name in names)]
    if not whole:
        raise InputError(f"{path}: expected rows with {', '.join(names)}, got none: the run was too short to log them")
    return whole


def _benchmark(path: str | Path, part: str) -> dict[str, Any]:
    """One part of the output of `benchmarks/explain.py`."""
    if not Path(path).is_file():
        raise InputError(f"no measurements at {path}: `python benchmarks/explain.py` makes them")
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    if not content.get(part):
        raise InputError(f"{path}: expected {part} among what benchmarks/explain.py measured, got {', '.join(content)}")
    return content[part]
