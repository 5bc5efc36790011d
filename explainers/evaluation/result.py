"""The numbers of some explainers on some images, and their table; and of one in training, beside its baselines."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from explainers.evaluation.evaluation import Evaluation
from explainers.evaluation.measurement import Measurement
from explainers.masking import PatchGrid
from explainers.metrics.cost import Passes
from explainers.metrics.curves import Curve
from explainers.metrics.perturbation import curve_columns
from explainers.models import TargetModel
from explainers.posthoc import build
from explainers.posthoc.defaults import build_quick_method

CURVES: tuple[Curve, ...] = ("fidelity_plus", "fidelity_minus")
"""The curves that are measured where none are named."""

CURVE_COLUMNS = curve_columns(CURVES)
COST_COLUMNS = {"seconds_per_image": "s/image ↓", "forward_passes": Passes.column}
"""Number → title of its column, of these curves and of what an explanation costs."""


@dataclass(frozen=True, repr=False, eq=False)
class EvaluationResult:
    """What `explainers.evaluate` returns; it prints as a table.

    Args:
        numbers: explainer → number, such as `fidelity_plus`, with its standard error over images as
            `fidelity_plus_error` → value.
        scores: explainer → number → its value for each image, (images,).
        images: name of each image.
        columns: number → title of its column in the table.
        transform: how photos became the model's images, see `ImageTransform`.
    """

    numbers: Mapping[str, Mapping[str, Any]]
    scores: Mapping[str, Mapping[str, Tensor]]
    images: Sequence[str]
    columns: Mapping[str, str]
    transform: Mapping[str, Any]

    def __repr__(self) -> str:
        return text_table(self.numbers, self.columns, f"{len(self.images)} image{'s' * (len(self.images) != 1)}")


def text_table(numbers: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str], title: str) -> str:
    """Format the numbers of explainers as a table for terminals, with standard errors.

    Args:
        numbers: explainer → number → value; the standard error of `x` is `x_error`.
        columns: number → title.
        title: above the names of the explainers.

    >>> row = {"fidelity_plus": 0.51, "fidelity_plus_error": 0.02, "fidelity_minus": 0.1}
    >>> print(text_table({"AnyHead": row}, CURVE_COLUMNS, "32 validation images"))
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
    return f"{row[key]:.3f}" + (f" ± {row[f'{key}_error']:.3f}".replace(" 0.", " .") if f"{key}_error" in row else "")


def build_baselines(target: TargetModel, grid: PatchGrid) -> dict[str, nn.Module]:
    """Name → explainer: the first quick method that explains the target on this grid, and chance."""
    return {**build_quick_method(target, grid), "chance": build("Chance", target, grid)}


def explain_by_baselines(explainer: Any, images: Tensor) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """Explain the predicted classes of uint8 images (B, C, H, W) by the baselines of an explainer.

    Returns:
        Name → heatmaps (B, rows, columns), and name → whether they are signed.
    """
    classes = explainer.target(images).argmax(-1)
    baselines: Mapping[str, Any] = build_baselines(explainer.target, explainer.grid)
    heatmaps = {name: baseline(images, classes) for name, baseline in baselines.items()}
    return heatmaps, {name: baseline.signed for name, baseline in baselines.items()}


def measure_beside_baselines(explainer: Any, batches: Iterable[Tensor], levels: int) -> dict[str, dict[str, float]]:
    """Measure the fidelity of an explainer and its baselines, in this process.

    Args:
        explainer: a trained explainer, with its `target` and `grid`.
        batches: images, uint8 (B, C, H, W) each.
        levels: number of sparsities, including 0 and 1.

    Returns:
        Explainer → numbers of `CURVES`, with their standard errors as `<number>_error`.
    """
    explainers = {type(explainer).__name__: explainer, **build_baselines(explainer.target, explainer.grid)}
    settings = Evaluation(explainer.grid, CURVES, levels, localization=(), agreement=())
    measurement = Measurement(explainer.target, explainers, settings).in_one_process()
    for images in batches:
        measurement.update({"image": images})
    results, _ = measurement.summarise()
    keys = [key for name in CURVES for key in (name, f"{name}_error")]
    return {name: {key: float(row[key]) for key in keys if key in row} for name, row in results.items()}
