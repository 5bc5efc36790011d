"""Transfers of explainability vectors between source and target tasks: what they gain, and how similar tasks are."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from explainers.errors import InputError
from explainers.report.results import read_columns, read_results
from explainers.report.tables import markdown, rows
from explainers.saved.files import write_atomically


@dataclass(frozen=True)
class Transfer:
    """One transfer from a source task to a target task, measured on test images before and after it."""

    source: str
    target: str
    cosine: float  # of the task vectors of both
    curvature: float  # of the target's predictions along the vector, see `lambda_sweep.curvature`; NaN if unknown
    errors: tuple[float, float]  # E-RMSE
    ranks: tuple[float, float]  # rank correlations
    accuracies: tuple[float, float]  # fractions

    @property
    def gain(self) -> float:
        """By how much the rank correlation rises; unlike the E-RMSE, no factor of the attributions changes it."""
        return self.ranks[1] - self.ranks[0]

    @property
    def accuracy_change(self) -> float:
        """Accuracy after the transfer minus before, as a fraction."""
        return self.accuracies[1] - self.accuracies[0]


Number = Callable[[Transfer], float]
GAIN, ACCURACY, COSINE, CURVATURE = "gain of ρ", "change of accuracy", "cosine of the task vectors", "curvature"
ERROR = "E-RMSE after the transfer"
MATRICES: dict[str, Number] = {
    GAIN: lambda transfer: transfer.gain,
    ACCURACY: lambda transfer: transfer.accuracy_change,
    COSINE: lambda transfer: transfer.cosine,
    CURVATURE: lambda transfer: transfer.curvature,
}
NUMBERS: dict[str, Number] = MATRICES | {ERROR: lambda transfer: transfer.errors[1]}
PUBLISHED = (COSINE, ERROR)
SCATTERS = (PUBLISHED, (COSINE, GAIN), (CURVATURE, GAIN), (CURVATURE, ACCURACY))


def read_transfers(folder: str | Path) -> list[Transfer]:
    """Read the transfers of a sweep of `ExplainabilityVector`, files <source>/<target>/metrics.json of a folder."""
    paths = sorted(Path(folder).glob("*/*/metrics.json"))
    between = [path for path in paths if path.parts[-3] != path.parts[-2]]
    if len(between) < 4:
        raise InputError(
            f"expected 4 transfers or more between different tasks, {folder}/<source>/<target>/metrics.json, got"
            f" {len(between)}: sweep over source and target tasks, as configs/names/figures.yaml shows"
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> Transfer:
    """Read one transfer from its metrics.json."""
    metrics = json.loads(path.read_text(encoding="utf-8"))
    measured = {
        name: (metrics.get(f"test/untouched/{name}"), metrics.get(f"test/transferred/{name}"))
        for name in ("e_rmse", "rank_correlation", "accuracy")
    }
    if any(None in pair for pair in measured.values()):
        raise InputError(f"{path}: expected test metrics of a transfer, got none: run it with test=true")
    cosine = metrics.get("val/cosine", math.nan)
    if not math.isfinite(cosine):
        raise InputError(
            f"{path}: expected the cosine of two task vectors, got none: the source needs a model that only"
            " predicts (module.vector.predicting=[...])"
        )
    return Transfer(path.parts[-3], path.parts[-2], cosine, metrics.get("val/curvature", math.nan), *measured.values())


def summary(
    files: Sequence[str | Path],
    words: Mapping[str, str],
    before: str,
    after: str,
    against: str,
    number: str = "rank_correlation",
) -> str:
    """A short table of one number and its forward passes, and a sentence on how a vector changes the number.

    Args:
        files: results.json files.
        words: explainer → what it is; other explainers are left out.
        before: explainer without the vector.
        after: explainer with it.
        against: explainer to compare with. The sentence is about the tasks that have all three.
        number: the number.
    """
    results, titles = read_results(files), read_columns(files)
    shown = {
        task: {words[name]: numbers for name, numbers in explainers.items() if name in words}
        for task, explainers in results.items()
    }
    table = markdown(rows(shown, {name: titles[name] for name in (number, "forward_passes")}))
    trios = {
        task: [explainers[name] for name in (before, after, against)]
        for task, explainers in results.items()
        if {before, after, against} <= explainers.keys()
    }
    if not trios:
        return table
    changes = [f"from {old[number]:.2f} to {new[number]:.2f} ({task})" for task, (old, new, _) in trios.items()]
    others = [f"{other[number]:.2f} ({task})" for task, (_, _, other) in trios.items()]
    passes = [numbers["forward_passes"] for numbers in next(iter(trios.values()))]
    return (
        f"{table}\nWith the vector, {titles[number].rstrip(' ↑↓')} goes {' and '.join(changes)}, at a cost of"
        f" {passes[1]} forward pass; {words[against]} has {' and '.join(others)}, at {passes[2]}.\n"
    )


def correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float, float]:
    """Pearson's r of two lists, its 95 % confidence interval and its two-sided p-value, by Fisher's transformation.

    Transfers of one source, or onto one target, are not independent: the interval is too narrow by an unknown amount.

    >>> [round(value, 2) for value in correlation([1, 2, 3, 4, 5], [1, 2, 3, 5, 4])]
    [0.9, 0.09, 0.99, 0.04]
    """
    r = float(np.corrcoef(x, y)[0, 1])
    if not abs(r) < 1:  # a perfect correlation, or NaN: one of the lists is constant
        return r, r, r, math.nan if math.isnan(r) else 0.0
    error = 1 / math.sqrt(len(x) - 3)
    low, high = (math.tanh(math.atanh(r) + side * 1.959964 * error) for side in (-1, 1))
    return r, low, high, math.erfc(abs(math.atanh(r)) / error / math.sqrt(2))


def similarity(folder: str | Path, table: str | Path | None = None, paper: float | None = None) -> Figure:
    """Matrices of gains, changes of accuracy, cosines and curvatures, and what cosine and curvature tell of a transfer.

    A transfer from a task onto itself is shown in the matrices, as an upper bound, but is no point of the scatters.

    Args:
        folder: folder of the transfers, see `read_transfers`.
        table: Markdown file to write the numbers to; `None` writes none.
        paper: published correlation, shown beside the measured one; `None` shows none.
    """
    transfers = read_transfers(folder)
    if table is not None:
        write_atomically(Path(table), f"{markdown(_rows(transfers))}\n{_correlations(transfers)}\n")
    side = 1.6 + 0.75 * len({transfer.target for transfer in transfers})
    figure = Figure(figsize=(4 * side, 2 * side), layout="constrained")
    matrices, scatters = figure.subplots(2, 4)
    for axis, (title, number) in zip(matrices, MATRICES.items(), strict=True):
        _matrix(axis, transfers, title, number)
    for axis, (x, y) in zip(scatters, SCATTERS, strict=True):
        _scatter(axis, _between(transfers), x, y, paper if (x, y) == PUBLISHED else None)
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
            "Curvature": f"{transfer.curvature:.3f}",
            "E-RMSE": " → ".join(f"{error:.3f}" for error in transfer.errors),
            "ρ": " → ".join(f"{rank:.3f}" for rank in transfer.ranks),
            "Gain ↑": f"{transfer.gain:.3f}",
            "Accuracy": " → ".join(f"{accuracy:.3f}" for accuracy in transfer.accuracies),
        }
        for transfer in transfers
    ]


def _correlations(transfers: Sequence[Transfer]) -> str:
    """A line for each scatter: the correlation of its two numbers."""
    between = _between(transfers)
    lines = [f"Of {len(between)} transfers between different tasks:", ""]
    for x, y in SCATTERS:
        r, low, high, p = correlation(*([NUMBERS[name](each) for each in between] for name in (x, y)))
        lines.append(f"- {x} and {y}: r = {r:.2f}, 95 % interval {low:.2f} to {high:.2f}, p = {p:.2g}")
    return "\n".join(lines)


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


def _scatter(axis: Axes, transfers: Sequence[Transfer], x: str, y: str, paper: float | None) -> None:
    """Draw two of `NUMBERS` of all transfers against each other, with a colour for each target."""
    for target in sorted({transfer.target for transfer in transfers}):
        own = [transfer for transfer in transfers if transfer.target == target]
        axis.plot(*([NUMBERS[name](one) for one in own] for name in (x, y)), "o", label=target)
    r, low, high, p = correlation(*([NUMBERS[name](one) for one in transfers] for name in (x, y)))
    published = "" if paper is None else f"; paper: {paper:.2f}"
    axis.set_title(f"r = {r:.2f} [{low:.2f}, {high:.2f}], p = {p:.2g}{published}", fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.legend(title="target", fontsize=8, title_fontsize=8)
    axis.grid(alpha=0.3)
