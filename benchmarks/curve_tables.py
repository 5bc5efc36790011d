"""Tables and the figure of `benchmarks/curve.py`, from the numbers of single images in its files."""

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.papers.figures import scale_logarithmically
from explainers.errors import InputError
from explainers.metrics.means import moments
from explainers.report.labels import choose_colours, legend_below

Curves = Mapping[int, Tensor]
"""Passes → Fidelity⁺ and Fidelity⁻ of every image, (images, 2)."""
Areas = dict[str, dict[str, dict[int, Tensor]]]
"""Removal → explainer → passes → Fidelity⁺ and Fidelity⁻ of every image, (images, 2)."""
FACTOR = 4
"""How many times as many passes the others get."""
CHOSEN = ("removals", "passes")
"""Settings that say which numbers a file has, and change none of them."""


def join_files(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the numbers of files with equal settings, each of which has other explainers, removals or batches."""
    numbers: dict[str, Any] = {}
    settings = [{name: each for name, each in file["settings"].items() if name not in CHOSEN} for file in files]
    for file, its_settings in zip(files, settings, strict=True):
        if its_settings != settings[0]:
            raise InputError(f"expected files with equal settings, got {file['settings']} and {files[0]['settings']}")
        for name, kept in file["numbers"].items():
            twice = sorted(kept.keys() & numbers.get(name, {}).keys())
            if twice:
                raise InputError(f"expected a batch in one file, got {name} {twice[0]} in two: leave out one of them")
            numbers[name] = numbers.get(name, {}) | kept
    chosen = {
        name: list(dict.fromkeys(each for file in files for each in file["settings"].get(name, ()))) for name in CHOSEN
    }
    return {**files[0], "settings": settings[0] | chosen, "numbers": numbers}


def select_removal(numbers: Mapping[str, Any], removal: str) -> dict[str, list[Any]]:
    """Explainer → its entries of a removal, of the batches that all explainers with entries have, in their order."""
    entries = {
        name: {key: each for key, each in kept.items() if key.split("/")[0] == removal and "fidelity" in each}
        for name, kept in numbers.items()
    }
    entries = {name: kept for name, kept in entries.items() if kept}
    common = set.intersection(*map(set, entries.values())) if entries else set()
    ordered = sorted(common, key=lambda key: int(key.split("/")[1]))
    return {name: [kept[key] for key in ordered] for name, kept in entries.items() if ordered}


def count_passes(entries: Sequence[Mapping[str, Any]], key: str) -> int:
    """Passes of the heatmaps of a key: the mean over images, where they were counted."""
    counts = [count for entry in entries for count in entry.get("spent", {}).get(key, ())]
    return round(sum(counts) / len(counts)) if counts else int(key)


def names_refined(numbers: Mapping[str, Any]) -> list[str]:
    """Names of what `refine` starts from; these alone have a yardstick."""
    return [name for name, kept in numbers.items() if any("yardstick" in entry for entry in kept.values())]


def arrange_areas(results: Mapping[str, Any]) -> Areas:
    """Arrange the fidelities of the images that all explainers have."""
    areas: Areas = {}
    for removal in results["settings"]["removals"]:
        areas[removal] = {
            name: {
                count_passes(entries, passes): torch.cat(
                    [torch.tensor(list(each["fidelity"][passes].values())) for each in entries], 1
                ).mT
                for passes in entries[0]["fidelity"]
            }
            for name, entries in select_removal(results["numbers"], removal).items()
        }
    return areas


def find_passes(curve: Mapping[int, float], wanted: float, sign: int) -> str:
    """The passes at which a curve, passes → mean, reaches a value, by interpolation on their logarithm.

    The sign is 1 if high values are better, −1 if low ones are.

    >>> find_passes({16: 0.0, 64: 1.0}, 0.5, sign=1), find_passes({16: 0.0, 64: 1.0}, 2.0, sign=1)
    ('32', '> 64')
    """
    before: tuple[int, float] | None = None
    for passes, value in sorted(curve.items()):
        if sign * value >= sign * wanted:
            if before is None:
                return f"≤ {passes}"
            share = (wanted - before[1]) / (value - before[1])
            return f"{exp(log(before[0]) + share * (log(passes) - log(before[0]))):.0f}"
        before = passes, value
    return f"> {max(curve)}"


def difference(first: Tensor, second: Tensor) -> str:
    """Mean paired difference of Fidelity⁺ and Fidelity⁻ over images, with standard errors."""
    mean, _, error = moments(first - second)
    plus, minus = (f"{m:+.3f} ± {e:.3f}" for m, e in zip(mean.tolist(), error.tolist(), strict=True))
    return f"{plus} | {minus}"


def tables(results: Mapping[str, Any]) -> str:
    """All tables, as Markdown."""
    lines: list[str] = []
    for removal, of_explainers in arrange_areas(results).items():
        count = max((len(each) for curve in of_explainers.values() for each in curve.values()), default=0)
        names = names_refined(results["numbers"])
        refined = {name: curve for name, curve in of_explainers.items() if name in names}
        others = {name: curve for name, curve in of_explainers.items() if name not in names}
        lines += [f"\n## {removal}, {count} of {results['settings']['images']} images\n", *_means(of_explainers)]
        lines += [*_compare_pairs(refined, others), *_passes_needed(refined, others)]
        lines += _yardsticks(results["numbers"], removal)
        lines += _costs(results["numbers"].get("cost", {}), removal)
    return "\n".join(lines)


def _means(of_explainers: Mapping[str, Curves]) -> list[str]:
    lines = ["| Explainer | Passes | Fidelity⁺ ↑ | Fidelity⁻ ↓ |", "| --- | --- | --- | --- |"]
    for name, curve in of_explainers.items():
        for passes, area in sorted(curve.items()):
            lines.append(f"| {name} | {passes} | {' | '.join(f'{mean:.3f}' for mean in area.mean(0).tolist())} |")
    return lines


def _compare_pairs(refined: Mapping[str, Curves], others: Mapping[str, Curves]) -> list[str]:
    """Paired differences: with as many passes as the other or the next lower number, and with a quarter of them."""
    lines = ["\n| Refined minus other | Fidelity⁺ ↑ | Fidelity⁻ ↓ |", "| --- | --- | --- |"]
    for name, curve in refined.items():
        for other, beside in others.items():
            for spent, area in sorted(beside.items()):
                fewer = [max((p for p in curve if p <= spent / factor), default=None) for factor in (1, FACTOR)]
                for passes in dict.fromkeys(each for each in fewer if each is not None):
                    row = difference(curve[passes], area)
                    lines.append(f"| {name} {passes} − {other} {spent} | {row} |")
    return lines


def _passes_needed(refined: Mapping[str, Curves], others: Mapping[str, Curves]) -> list[str]:
    lines = ["\n| Passes for the same Fidelity⁺, Fidelity⁻ | " + " | ".join(others) + " |"]
    lines.append("| --- " * (1 + len(others)) + "|")
    for name, curve in refined.items():
        for passes, area in sorted(curve.items()):
            wanted = area.mean(0).tolist()
            cells = []
            for beside in others.values():
                means = {p: each.mean(0).tolist() for p, each in beside.items()}
                sides = [
                    find_passes({p: mean[side] for p, mean in means.items()}, wanted[side], sign)
                    for side, sign in enumerate((1, -1))
                ]
                cells.append(", ".join(sides))
            lines.append(f"| {name} {passes} | " + " | ".join(cells) + " |")
    return lines


def _yardsticks(numbers: Mapping[str, Any], removal: str) -> list[str]:
    lines = ["\n| Rank correlation with the most passes | Reference | Mean | Error |", "| --- | --- | --- | --- |"]
    for reference, entries in select_removal(numbers, removal).items():
        for name in entries[0].get("yardstick", ()):
            values = torch.tensor([value for entry in entries for value in entry["yardstick"][name]]).double()
            mean, _, error = (each.item() for each in moments(values[:, None]))
            lines.append(f"| {name} | {reference} | {mean:.3f} | {error:.3f} |")
    return lines


def _costs(kept: Mapping[str, Any], removal: str) -> list[str]:
    lines = ["\n| Passes | Time of refine relative to its masked passes |", "| --- | --- |"]
    entries = [each["cost"] for key, each in kept.items() if key.split("/")[0] == removal and each["cost"]]
    for passes in entries[0] if entries else ():
        ratios = [whole / masked for entry in entries for whole, masked in entry[passes]]
        lines.append(f"| {passes} | {median(ratios):.3f} |")
    return lines if entries else []


def draw_figure(results: Mapping[str, Any]) -> Figure:
    """Fidelity⁺ and Fidelity⁻ against passes: a column for each removal, a line for each explainer.

    A heatmap of a prior, which needs no masked pass, stands at 1.
    """
    areas = arrange_areas(results)
    figure = Figure(figsize=(1 + 4 * len(areas), 6.6), layout="constrained")
    axes = figure.subplots(2, len(areas), squeeze=False, sharex=True, sharey="row")
    colours = choose_colours(name for name in results["numbers"] if name != "cost")
    names = names_refined(results["numbers"])
    for column, (removal, of_explainers) in enumerate(areas.items()):
        for side, axis in enumerate(axes[:, column]):
            for name, curve in of_explainers.items():
                refined, alone = name in names, len(curve) == 1
                label = name if not refined else "refined without a prior" if name == "none" else f"{name}, refined"
                passes = sorted(curve)
                axis.plot(
                    [max(1, each) for each in passes],
                    [curve[each][:, side].mean().item() for each in passes],
                    color=colours[name],
                    label=label,
                    marker="*" if alone else "o",
                    linestyle="-" if refined else "--",
                    markersize=10 if alone else 4,
                )
            scale_logarithmically(axis, "x")
            axis.grid(alpha=0.3)
        axes[0, column].set_title(f"removal: {removal}")
        axes[-1, column].set_xlabel("forward passes per image")
    axes[0, 0].set_ylabel("Fidelity⁺  (higher is better)")
    axes[1, 0].set_ylabel("Fidelity⁻  (lower is better)")
    legend_below(figure, axes.flat)
    return figure
