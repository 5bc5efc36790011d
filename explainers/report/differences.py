"""Differences between explainers on the same images, as tables."""

import csv
import io
from collections.abc import Mapping

import torch

from explainers.errors import InputError
from explainers.metrics.means import ImageScores
from explainers.metrics.pairs import CONFIDENCE, Pairs, paired_differences
from explainers.report.labels import direction, make_title, names_in
from explainers.report.results import Results
from explainers.report.tables import markdown

Compared = Mapping[str, Mapping[str, tuple[list[str], Pairs]]]
"""Task → number → the explainers that have it for two images or more, and their pairs."""


def compare_pairs(results: Results, scores: Mapping[str, ImageScores], numbers: Mapping[str, str]) -> Compared:
    """Compare all explainers of `results`, in their order, in pairs: each of the numbers, from `scores` of images."""
    pairs: dict[str, dict[str, tuple[list[str], Pairs]]] = {}
    for task, explainers in results.items():
        rows = scores[task].rows if task in scores else {}
        for number in numbers:
            names = [name for name in explainers if number in rows.get(name, {})]
            if len(names) > 1:
                images = torch.stack([rows[name][number] for name in names], 1)
                pairs.setdefault(task, {})[number] = names, paired_differences(images)
    return pairs


def difference_tables(
    results: Results, pairs: Compared, titles: Mapping[str, str], minus: str | None = None
) -> dict[str, str]:
    """File name → text: differences.md from one explainer, differences.csv of all pairs; empty without pairs.

    Args:
        results: task → explainer → numbers.
        pairs: the explainers of `results`, `compare_pairs`.
        titles: number → column title, with an arrow towards better values.
        minus: name of the explainer that is subtracted from the others; `None` subtracts the best of each number.
    """
    if minus is not None and minus not in names_in(results):
        listed = ", ".join(names_in(results)) or "none"
        raise InputError(f"expected differences from one of {listed}, got differences={minus}: name one, or null")
    if not pairs:
        return {}
    lines = []
    for task, numbers in pairs.items():
        cells: dict[str, dict[str, str]] = {name: {} for name in results[task]}
        for number, (names, of_number) in numbers.items():
            sign = direction(titles[number])
            if not minus and not sign:
                continue  # no explainer is the best
            best = max(names, key=lambda name: sign * results[task][name][number])
            for name in results[task]:
                cells[name][titles[number]] = _cell(name, minus or best, names, of_number)
        lines += [{"Task": task, "Explainer": make_title(name)} | row for name, row in cells.items()]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    table = markdown([{key: line.get(key, "–") for key in columns} for line in lines])
    return {"differences.md": f"{legend(minus)}\n\n{table}", "differences.csv": _comma_separated(pairs)}


def legend(minus: str | None) -> str:
    """One line that says what a table of differences shows."""
    base = "the best of the task in each column" if minus is None else make_title(minus)
    return (
        f"Each explainer minus {base}, on the same images; ± half of the {100 * CONFIDENCE:.0f} % interval of one pair;"
        f" `*`: p < {1 - CONFIDENCE:.2f}, corrected for all pairs of explainers of the task (Holm)"
    )


def _cell(name: str, base: str, names: list[str], pairs: Pairs) -> str:
    """The difference between two explainers, as in `+0.012 ± 0.010 *`."""
    if name == base:
        return "0"
    if name not in names or base not in names:
        return "–"
    at = names.index(name), names.index(base)
    if pairs.images[at] < 2:
        return "–"
    return f"{pairs.mean[at]:+.3f} ± {pairs.half_width[at]:.3f}{' *' if pairs.significant[at] else ''}"


def _comma_separated(compared_pairs: Compared) -> str:
    """All pairs with two shared images or more as CSV, unrounded."""
    text = io.StringIO()
    writer = csv.writer(text)
    columns = "images", "difference", "error", "low", "high", "p", "p_holm"
    writer.writerow(["task", "number", "explainer", "minus", *columns])
    for task, numbers in compared_pairs.items():
        for number, (names, pairs) in numbers.items():
            ends = pairs.mean - pairs.half_width, pairs.mean + pairs.half_width
            tensors = pairs.images, pairs.mean, pairs.error, *ends, pairs.p, pairs.corrected
            for i, j in (pairs.images.triu(1) > 1).nonzero().tolist():
                writer.writerow([task, number, names[i], names[j], *(each[i, j].item() for each in tensors)])
    return text.getvalue()
