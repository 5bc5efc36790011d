"""The numbers of some explainers on some images, and their table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from explainers.metrics.cost import Passes
from explainers.metrics.curves import Curve
from explainers.metrics.perturbation import curve_columns

CURVES: tuple[Curve, ...] = ("fidelity_plus", "fidelity_minus")
"""The curves that are measured where none are named."""

COST_COLUMNS = {"seconds_per_image": "s/image ↓", "forward_passes": Passes.column}


@dataclass(frozen=True, repr=False, eq=False)
class EvaluationResult:
    """What `explainers.evaluate` returns; it prints as a table.

    Args:
        numbers: explainer → number, such as `fidelity_plus`, with its standard error over images as
            `fidelity_plus_error` → value.
        scores: explainer → number → its value for each image, (images,).
        images: name of each image.
        columns: number → title of its column in the table.
    """

    numbers: Mapping[str, Mapping[str, Any]]
    scores: Mapping[str, Mapping[str, Tensor]]
    images: Sequence[str]
    columns: Mapping[str, str]

    def __repr__(self) -> str:
        return text_table(self.numbers, self.columns, f"{len(self.images)} image{'s' * (len(self.images) != 1)}")


def text_table(numbers: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str], title: str) -> str:
    """Format the numbers of explainers as a table for terminals, with standard errors.

    Args:
        numbers: explainer → number → value; the standard error of `x` is `x_error`.
        columns: number → title.
        title: above the names of the explainers.

    >>> row = {"fidelity_plus": 0.51, "fidelity_plus_error": 0.02, "fidelity_minus": 0.1}
    >>> print(text_table({"AnyHead": row}, curve_columns(CURVES), "32 validation images"))
    32 validation images    Fidelity⁺ ↑    Fidelity⁻ ↓
    AnyHead                0.510 ± .020          0.100
    """
    width = max(20, *(len(each) for each in (title, *numbers)))
    lines = ["".join([f"{title:{width}}", *(f"{column:>15}" for column in columns.values())])]
    for name, row in numbers.items():
        lines.append("".join([f"{name:{width}}", *(f"{_cell(row, key):>15}" for key in columns)]))
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return "–"
    if isinstance(row[key], int):
        return str(row[key])
    return f"{row[key]:.3f}" + (f" ± {row[f'{key}_error']:.3f}".replace("0.", ".") if f"{key}_error" in row else "")


def columns_of(curves: Sequence[str], cost: bool = True) -> dict[str, str]:
    """Number → title of its column, of curves, and of what an explanation costs."""
    return curve_columns(curves) | (COST_COLUMNS if cost else {})
