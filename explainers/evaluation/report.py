"""Results as tables: Markdown, LaTeX and CSV, with the values of a paper beside them where they are asked for."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explainers.errors import InputError
from explainers.evaluation.results import Results
from explainers.metrics.perturbation import Fidelity

FIDELITIES = tuple(Fidelity.columns)
LATEX = str.maketrans(
    {name: f"\\{name}" for name in "_%&#$"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "⁺": "$^{+}$", "⁻": "$^{-}$", "ρ": r"$\rho$", "–": "--"}
)


@dataclass(frozen=True)
class Reference:
    """Fidelities that others printed, of one target model.

    Args:
        source: who printed them.
        target: whose values to show, one of the keys of `values`.
        values: target → task → explainer → [Fidelity⁺, Fidelity⁻].
    """

    source: str
    target: str
    values: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]

    def __post_init__(self) -> None:
        if self.target not in self.values:
            raise InputError(
                f"expected a target that the {self.source} has values of, got {self.target}: "
                f"set reference.target to one of {', '.join(self.values)}"
            )

    def title(self, column: str) -> str:
        """The head of a column."""
        return f"{Fidelity.columns[column]} {self.source}, {self.target}"

    def value(self, task: str, explainer: str, column: str) -> float | None:
        """None where nothing was printed."""
        printed = self.values[self.target].get(task, {}).get(explainer)
        return printed[FIDELITIES.index(column)] if printed else None


def rows(results: Results, titles: Mapping[str, str], reference: Reference | None = None) -> list[dict[str, str]]:
    """One row of text for each task and explainer; fidelities with their standard errors.

    Args:
        results: the numbers.
        titles: number → title of its column, in their order; other numbers are left out.
        reference: values of a paper to show beside them.
    """
    flat = [(task, name, found) for task, explainers in results.items() for name, found in explainers.items()]
    columns = [column for column in titles if any(column in found for _, _, found in flat)]
    table = []
    for task, name, found in flat:
        row = {"Task": task, "Explainer": name}
        for column in columns:
            row[titles[column]] = _cell(found, column)
            if reference and column in FIDELITIES:
                row[reference.title(column)] = _printed(reference.value(task, name, column))
        table.append(row)
    return table


def _cell(found: Mapping[str, Any], column: str) -> str:
    if column not in found:
        return "–"
    if f"{column}_error" in found:
        return f"{found[column]:.3f} ± {found[f'{column}_error']:.3f}"
    return f"{found[column]:.1f}" if column == "images_per_second" else f"{found[column]:.3f}"


def _printed(value: float | None) -> str:
    """With the two digits that papers give, or the three."""
    if value is None:
        return "–"
    return f"{value:.2f}" if round(value, 2) == value else f"{value:.3f}"


def tables(results: Results, titles: Mapping[str, str], reference: Reference | None = None) -> dict[str, str]:
    """File name → text of every table; none where there are no results."""
    if not results:
        return {}
    table = rows(results, titles, reference)
    return {"results.csv": comma_separated(results, reference), "table.tex": latex(table), "table.md": markdown(table)}


def markdown(table: list[dict[str, str]]) -> str:
    """The rows in Markdown, with aligned columns, so that they read well on a terminal too."""
    widths = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    lines = [
        " | ".join(name.ljust(width) for name, width in widths.items()),
        " | ".join("-" * width for width in widths.values()),
        *(" | ".join(row[name].ljust(width) for name, width in widths.items()) for row in table),
    ]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def latex(table: list[dict[str, str]]) -> str:
    """The rows for LaTeX with booktabs: a rule between the tasks, each task named once."""
    lines = [f"\\begin{{tabular}}{{ll{'r' * (len(table[0]) - 2)}}}", "\\toprule", _line(table[0].keys())]
    task = None
    for row in table:
        if row["Task"] != task:
            lines.append("\\midrule")
        lines.append(_line(["" if row["Task"] == task else row["Task"], *list(row.values())[1:]]))
        task = row["Task"]
    return "\n".join(["% \\usepackage{booktabs}", *lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _line(cells: Any) -> str:
    return " & ".join(re.sub(r"^-(?=\d)", "$-$", cell.translate(LATEX)) for cell in cells) + " \\\\"


def comma_separated(results: Results, reference: Reference | None = None) -> str:
    """Every single number that was measured, unrounded."""
    flat = []
    for task, explainers in results.items():
        for name, found in explainers.items():
            row: dict[str, Any] = {"task": task, "explainer": name}
            row |= {key: value for key, value in found.items() if not isinstance(value, list)}
            if reference:
                printed = {key: reference.value(task, name, key) for key in FIDELITIES}
                row |= {f"{key} ({reference.source}, {reference.target})": value for key, value in printed.items()}
            flat.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)))
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
