"""Transfers of explainability vectors between source and target tasks: what they gain, and how similar tasks are."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from explainers.errors import InputError
from explainers.report.tables import markdown
from explainers.saved.files import write_atomically


@dataclass(frozen=True)
class Transfer:
    """One transfer, measured on test images before and after the vector is added.

    Attributes:
        source: name of the source task.
        target: name of the target task.
        cosine: of the task vectors of source and target.
        errors: E-RMSE before and after.
        accuracies: accuracy before and after, as fractions.
    """

    source: str
    target: str
    cosine: float
    errors: tuple[float, float]
    accuracies: tuple[float, float]

    @property
    def gain(self) -> float:
        """By how much the E-RMSE falls, relative to that before the transfer."""
        return 1 - self.errors[1] / self.errors[0]

    @property
    def accuracy_change(self) -> float:
        """Accuracy after the transfer minus before, as a fraction."""
        return self.accuracies[1] - self.accuracies[0]


def read_transfers(folder: str | Path) -> list[Transfer]:
    """Read the transfers of a sweep over source and target tasks.

    Args:
        folder: folder of `ExplainabilityVector` runs, with files <source>/<target>/metrics.json.

    Raises:
        InputError: for fewer than 4 transfers between different tasks, for a transfer that was not tested, or without
            cosines, because the sources have no predicting model.
    """
    paths = sorted(Path(folder).glob("*/*/metrics.json"))
    between = [path for path in paths if path.parts[-3] != path.parts[-2]]
    if len(between) < 4:
        raise InputError(
            f"expected 4 transfers or more between different tasks, {folder}/<source>/<target>/metrics.json, got"
            f" {len(between)}: sweep over source and target tasks, as the head of configs/figures/similarity.yaml shows"
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> Transfer:
    """Read one transfer from its metrics.json."""
    metrics = json.loads(path.read_text())
    measured = {
        name: (metrics.get(f"test/untouched/{name}"), metrics.get(f"test/transferred/{name}"))
        for name in ("e_rmse", "accuracy")
    }
    if None in (*measured["e_rmse"], *measured["accuracy"]):
        raise InputError(f"{path}: expected test metrics of a transfer, got none: run it with test=true")
    cosine = metrics.get("val/cosine", math.nan)
    if not math.isfinite(cosine):
        raise InputError(
            f"{path}: expected the cosine of two task vectors, got none: the source needs a model that only"
            " predicts (explainer.predicting=...)"
        )
    return Transfer(path.parts[-3], path.parts[-2], cosine, measured["e_rmse"], measured["accuracy"])


def correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float, float]:
    """Pearson's r of two lists, its 95 % confidence interval and its two-sided p-value, by Fisher's transformation.

    Transfers of one source, or onto one target, are not independent: the interval is too narrow by an unknown amount.

    >>> [round(value, 2) for value in correlation([1, 2, 3, 4, 5], [1, 2, 3, 5, 4])]
    [0.9, 0.09, 0.99, 0.04]

    Args:
        x: the first list, of 4 numbers or more.
        y: the second list, of as many.

    Returns:
        r, the ends of the interval, and p.
    """
    r = float(np.corrcoef(x, y)[0, 1])
    if not abs(r) < 1:  # a perfect correlation, or NaN: one of the lists is constant
        return r, r, r, math.nan if math.isnan(r) else 0.0
    error = 1 / math.sqrt(len(x) - 3)
    low, high = (math.tanh(math.atanh(r) + side * 1.959964 * error) for side in (-1, 1))
    return r, low, high, math.erfc(abs(math.atanh(r)) / error / math.sqrt(2))


def similarity(folder: str | Path, table: str | Path | None = None, paper: float | None = None) -> Figure:
    """Matrices of gains, changes of accuracy and cosines, and E-RMSE against the cosine of the task vectors.

    A transfer from a task onto itself is shown in the matrices, as an upper bound, but is no point of the scatter.

    Args:
        folder: folder of the transfers, see `read_transfers`.
        table: Markdown file to write the numbers to; `None` writes none.
        paper: published correlation, shown beside the measured one; `None` shows none.
    """
    transfers = read_transfers(folder)
    if table is not None:
        write_atomically(Path(table), f"{markdown(_rows(transfers))}\n{_correlations(transfers)}\n")
    side = 1.6 + 0.75 * len({transfer.target for transfer in transfers})
    figure = Figure(figsize=(2 * side + 2, 2 * side), layout="constrained")
    axes = figure.subplots(2, 2).flat
    _matrix(axes[0], transfers, "gain: relative fall of E-RMSE", lambda transfer: transfer.gain)
    _matrix(axes[1], transfers, "change of accuracy", lambda transfer: transfer.accuracy_change)
    _matrix(axes[2], transfers, "cosine of the task vectors", lambda transfer: transfer.cosine)
    _scatter(axes[3], _between(transfers), paper)
    return figure


def _between(transfers: Sequence[Transfer]) -> list[Transfer]:
    """The transfers between different tasks."""
    return [transfer for transfer in transfers if transfer.source != transfer.target]


def _rows(transfers: Sequence[Transfer]) -> list[dict[str, str]]:
    """The rows of the table."""
    return [
        {
            "Source": transfer.source,
            "Target": transfer.target,
            "cos(τ_S, τ_T)": f"{transfer.cosine:.3f}",
            "E-RMSE": " → ".join(f"{error:.3f}" for error in transfer.errors),
            "Gain ↑": f"{transfer.gain:.3f}",
            "Accuracy": " → ".join(f"{accuracy:.3f}" for accuracy in transfer.accuracies),
        }
        for transfer in transfers
    ]


def _correlations(transfers: Sequence[Transfer]) -> str:
    """One line for the correlations of the cosine with E-RMSE after the transfer, and with the gain."""
    between = _between(transfers)
    cosines = [transfer.cosine for transfer in between]
    lists = {
        "E-RMSE after the transfer": [transfer.errors[1] for transfer in between],
        "gain": [transfer.gain for transfer in between],
    }
    parts = []
    for name, values in lists.items():
        r, low, high, p = correlation(cosines, values)
        parts.append(f"{name}: r = {r:.2f}, 95 % interval {low:.2f} to {high:.2f}, p = {p:.2g}")
    return f"Cosine against {'; '.join(parts)} ({len(between)} transfers between different tasks)."


def _matrix(axis: Axes, transfers: Sequence[Transfer], title: str, number: Callable[[Transfer], float]) -> None:
    """Draw one number of all transfers: a row for each source, a column for each target."""
    sources, targets = (sorted({getattr(transfer, role) for transfer in transfers}) for role in ("source", "target"))
    values = np.full((len(sources), len(targets)), math.nan)
    for transfer in transfers:
        values[sources.index(transfer.source), targets.index(transfer.target)] = number(transfer)
    largest = float(np.nanmax(np.abs(values))) or 1.0
    axis.imshow(values, cmap="RdBu", vmin=-largest, vmax=largest)
    for row, column in np.argwhere(np.isfinite(values)):
        value = values[row, column]
        colour = "white" if abs(value) > 0.6 * largest else "black"
        axis.text(column, row, f"{round(value, 2) + 0:.2f}", ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(len(targets)), targets, rotation=40, ha="right", rotation_mode="anchor")
    axis.set_yticks(range(len(sources)), sources)
    axis.set_xlabel("target")
    axis.set_ylabel("source")
    axis.set_title(title, fontsize=10)


def _scatter(axis: Axes, transfers: Sequence[Transfer], paper: float | None) -> None:
    """Draw E-RMSE after each transfer against the cosine; a colour for each target, whose errors have one scale."""
    cosines, errors = ([transfer.cosine for transfer in transfers], [transfer.errors[1] for transfer in transfers])
    for target in sorted({transfer.target for transfer in transfers}):
        own = [transfer for transfer in transfers if transfer.target == target]
        axis.plot([one.cosine for one in own], [one.errors[1] for one in own], "o", label=target)
    r, low, high, p = correlation(cosines, errors)
    published = "" if paper is None else f"; paper: {paper:.2f}"
    axis.set_title(f"r = {r:.2f} [{low:.2f}, {high:.2f}], p = {p:.2g}{published}", fontsize=10)
    axis.set_xlabel("cosine of the task vectors")
    axis.set_ylabel("E-RMSE after the transfer")
    axis.legend(title="target", fontsize=8, title_fontsize=8)
    axis.grid(alpha=0.3)
