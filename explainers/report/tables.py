"""Writes results as Markdown, LaTeX and CSV tables, optionally next to the values of a paper."""

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explainers.errors import InputError
from explainers.report.labels import make_title
from explainers.report.results import Results

LATEX = str.maketrans(
    {name: f"\\{name}" for name in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "⁺": "$^{+}$", "⁻": "$^{-}$", "ρ": r"$\rho$", "–": "--"}
)

Published = Mapping[str, Mapping[str, Mapping[str, float]]]  # Task → explainer → number → published value


@dataclass(frozen=True)
class Reference:
    """Published values for one target model; any number of results may have one.

    >>> paper = Reference("paper", "ViT-B", {"ViT-B": {"pets": {"TVE": {"fidelity_minus": 0.1}}}})
    >>> paper.value("pets", "TVE", "fidelity_minus"), paper.value("pets", "random", "fidelity_minus")
    (0.1, None)
    """

    source: str  # the publication
    target: str  # the target model, one of the keys of `values`
    values: Mapping[str, Published]  # target → task → explainer → number → value, in the units of results

    def __post_init__(self) -> None:
        if self.target not in self.values:
            raise InputError(
                f"expected a target that the {self.source} has values of, got {self.target}: "
                f"set reference.target to one of {', '.join(self.values)}"
            )

    def title(self, column: str) -> str:
        """The title of the column of published values beside the measured ones, given the title of these."""
        return f"{column} {self.source}, {self.target}"

    def value(self, task: str, explainer: str, number: str) -> float | None:
        """The published value, or `None` if there is none.

        A row's options, `RISE(masks=50)`, count only if published rows of its method have options: `ViTCX(sigma=0)`.
        """
        of_task, method = self.values[self.target].get(task, {}), explainer.partition("(")[0]
        of_any = {} if any(name.startswith(f"{method}(") for name in of_task) else of_task.get(method, {})
        return of_task.get(explainer, of_any).get(number)

    def published(self, results: Results) -> set[str]:
        """The measured numbers for which at least one row has a published value."""
        flat = [(task, name, key) for task, measured in results.items() for name in measured for key in measured[name]]
        return {key for task, name, key in flat if self.value(task, name, key) is not None}

    def missing(self, results: Results) -> str | None:
        """One line that lists the published rows if none of the results has a published value; otherwise `None`."""
        if self.published(results):
            return None
        known = [f"{', '.join(names)} on {task}" for task, names in self.values[self.target].items()]
        return (
            f"reference: the {self.source} has values of {self.target} for {'; '.join(known) or 'nothing'}, and of no"
            " number of these results (reference.target=... names another model)"
        )


def rows(results: Results, titles: Mapping[str, str], reference: Reference | None = None) -> list[dict[str, str]]:
    """Format one row for each task and explainer; means over images include their standard errors where they are known.

    >>> results = {"pets": {"TVE": {"fidelity_plus": 0.5, "fidelity_plus_error": 0.01}}}
    >>> rows(results, {"fidelity_plus": "Fidelity⁺ ↑", "accuracy": "Accuracy ↑"})
    [{'Task': 'pets', 'Explainer': 'TVE', 'Fidelity⁺ ↑': '0.500 ± 0.010'}]

    Args:
        results: task → explainer → numbers.
        titles: number → column title, in the order of the columns; other numbers are left out.
        reference: a number with a published value in any row gets a second column.
    """
    flat = [(task, name, numbers) for task, explainers in results.items() for name, numbers in explainers.items()]
    columns = [column for column in titles if any(column in numbers for _, _, numbers in flat)]
    published = reference.published(results) if reference else set()
    table = []
    for task, name, numbers in flat:
        row = {"Task": task, "Explainer": make_title(name)}
        for column in columns:
            row[titles[column]] = _cell(numbers, column)
            if reference and column in published:
                row[reference.title(titles[column])] = _format_value(reference.value(task, name, column))
        table.append(row)
    return table


def _cell(numbers: Mapping[str, Any], column: str) -> str:
    if column not in numbers:
        return "–"
    if f"{column}_error" in numbers:
        return f"{numbers[column]:.3f} ± {numbers[f'{column}_error']:.3f}"
    if isinstance(numbers[column], int):
        return str(numbers[column])
    return f"{numbers[column]:.1f}" if column == "images_per_second" else f"{numbers[column]:.3f}"


def _format_value(value: float | None) -> str:
    """Format a published value with two decimals, or with three if it has three."""
    if value is None:
        return "–"
    return f"{value:.2f}" if round(value, 2) == value else f"{value:.3f}"


def format_tables(results: Results, titles: Mapping[str, str], reference: Reference | None = None) -> dict[str, str]:
    """File name → text of all tables; empty if there are no results."""
    if not results:
        return {}
    table = rows(results, titles, reference)
    return {"results.csv": format_csv(results, reference), "table.tex": latex(table), "table.md": markdown(table)}


def markdown(table: list[dict[str, str]]) -> str:
    """Format rows as a Markdown table, with aligned columns for terminals.

    >>> print(markdown([{"Task": "pets", "Explainer": "TVE"}]), end="")
    | Task | Explainer |
    | ---- | --------- |
    | pets | TVE       |
    """
    table = [{name: cell.replace("|", r"\|") for name, cell in row.items()} for row in table]
    widths = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    lines = [
        " | ".join(name.ljust(width) for name, width in widths.items()),
        " | ".join("-" * width for width in widths.values()),
        *(" | ".join(row[name].ljust(width) for name, width in widths.items()) for row in table),
    ]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def latex(table: list[dict[str, str]]) -> str:
    """Format rows as a LaTeX table with booktabs: a rule before each task, whose name is in its first row only."""
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


def format_csv(results: Results, reference: Reference | None = None) -> str:
    """Format all measured scalars as CSV, unrounded."""
    flat = []
    published = reference.published(results) if reference else set()
    for task, explainers in results.items():
        for name, numbers in explainers.items():
            row: dict[str, Any] = {"task": task, "explainer": name}
            row |= {key: value for key, value in numbers.items() if not isinstance(value, list)}
            if reference:
                printed = {key: reference.value(task, name, key) for key in numbers if key in published}
                row |= {f"{key} ({reference.source}, {reference.target})": value for key, value in printed.items()}
            flat.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)))
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
