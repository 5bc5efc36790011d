"""Results as people read them: a table, and fidelity-sparsity curves."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Task → explainer → what `Evaluation` measured."""

COLUMNS = {
    "fidelity_plus": "Fidelity⁺ ↑",
    "fidelity_minus": "Fidelity⁻ ↓",
    "pointing_game": "Hit rate ↑",
    "rank_correlation": "ρ with the oracle ↑",
    "images_per_second": "Images/s ↑",
}


def rows(results: Results) -> list[dict[str, str]]:
    """One row of text for each task and explainer; fidelities with their standard errors."""
    flat = [(task, name, found) for task, explainers in results.items() for name, found in explainers.items()]
    columns = [column for column in COLUMNS if any(column in found for _, _, found in flat)]
    return [
        {"Task": task, "Explainer": name} | {COLUMNS[column]: _cell(found, column) for column in columns}
        for task, name, found in flat
    ]


def _cell(found: Mapping[str, Any], column: str) -> str:
    if column not in found:
        return "–"
    if f"{column}_error" in found:
        return f"{found[column]:.3f} ± {found[f'{column}_error']:.3f}"
    return f"{found[column]:.1f}" if column == "images_per_second" else f"{found[column]:.3f}"


def markdown(results: Results) -> str:
    """The table in Markdown, its columns aligned so that it reads well on a terminal too."""
    table = rows(results)
    widths = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    lines = [
        " | ".join(name.ljust(width) for name, width in widths.items()),
        " | ".join("-" * width for width in widths.values()),
        *(" | ".join(row[name].ljust(width) for name, width in widths.items()) for row in table),
    ]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def comma_separated(results: Results) -> str:
    """Every single number that was measured, unrounded."""
    flat = [
        {"task": task, "explainer": name} | {key: value for key, value in found.items() if not isinstance(value, list)}
        for task, explainers in results.items()
        for name, found in explainers.items()
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)))
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def draw_curves(results: Results, path: Path) -> None:
    """Fidelity⁺ and Fidelity⁻ against sparsity (TVE, Figure 12): a column for each task, a line for each explainer."""
    figure = Figure(figsize=(0.8 + 3.2 * len(results), 5.6), layout="constrained")
    axes = figure.subplots(2, len(results), squeeze=False, sharex=True, sharey="row")
    for column, (task, explainers) in enumerate(results.items()):
        for row, curve in enumerate(("fidelity_plus_curve", "fidelity_minus_curve")):
            for name, found in explainers.items():
                axes[row, column].plot(found["sparsity"], found[curve], label=name)
            axes[row, column].grid(alpha=0.3)
        axes[0, column].set_title(task)
        axes[1, column].set_xlabel("sparsity |S*| / N")
    axes[0, 0].set_ylabel("Fidelity⁺  (higher is better)")
    axes[1, 0].set_ylabel("Fidelity⁻  (lower is better)")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
