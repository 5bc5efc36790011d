"""The perturbation curves of the papers; one perturbation sweep gives all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from explainers.errors import checks_choices

Curve = Literal[
    "fidelity_plus",
    "fidelity_minus",
    "relevance_gain",
    "deletion",
    "insertion",
    "deletion_accuracy",
    "insertion_accuracy",
    "deletion_accuracy_5",
    "insertion_accuracy_5",
    "deletion_accuracy_10",
    "insertion_accuracy_10",
    "deletion_aopc",
    "insertion_aopc",
    "aopc",
    "log_odds",
    "positive_perturbation",
    "negative_perturbation",
]
"""Name of a perturbation curve, see `CURVES`."""

TOP = {"correct": 1, "correct_5": 5, "correct_10": 10}  # quantity, 1 if the label is among the k highest logits → k
QUANTITIES = ("probability", "log_probability", "logit", *TOP)
"""What a sweep records: three outputs for the explained class, and whether the target predicts the label, see `TOP`."""


@dataclass(frozen=True)
class Shape:
    """A curve over sparsities s: `whole` · f(x) + `removed` · f(x without S*) + `preserved` · f(only S* of x)."""

    title: str  # of its column, with an arrow towards better values
    quantity: str  # the output f of the target, one of `QUANTITIES`
    whole: int
    removed: int
    preserved: int
    mean: bool = False  # whether its number is the mean over the levels, otherwise the trapezoidal area


CURVES: dict[str, Shape] = {
    # TVE, Appendix G
    "fidelity_plus": Shape("Fidelity⁺ ↑", "probability", 1, -1, 0),
    "fidelity_minus": Shape("Fidelity⁻ ↓", "probability", 1, 0, -1),
    # Symmetric relevance gain (Blücher et al., 2024): a random order scores 0 for every removal
    "relevance_gain": Shape("SRG ↑", "logit", 0, -1, 1),
    # RISE and ViT-CX, Section 4.1
    "deletion": Shape("Deletion ↓", "probability", 0, 1, 0),
    "insertion": Shape("Insertion ↑", "probability", 0, 0, 1),
    # SkipPLUS, Appendix A.1, which prints the first and the last as 100 − x. TokenTM calls the first AUC
    "deletion_accuracy": Shape("Deletion accuracy ↓", "correct", 0, 1, 0),
    "insertion_accuracy": Shape("Insertion accuracy ↑", "correct", 0, 0, 1),
    # Grad-ECLIP: the label is among the 5, or 10, highest logits. The preset metrics=grad_eclip sets steps and range
    "deletion_accuracy_5": Shape("Deletion accuracy, top 5 ↓", "correct_5", 0, 1, 0),
    "insertion_accuracy_5": Shape("Insertion accuracy, top 5 ↑", "correct_5", 0, 0, 1),
    "deletion_accuracy_10": Shape("Deletion accuracy, top 10 ↓", "correct_10", 0, 1, 0),
    "insertion_accuracy_10": Shape("Insertion accuracy, top 10 ↑", "correct_10", 0, 0, 1),
    "deletion_aopc": Shape("Deletion AOPC ↑", "probability", 1, -1, 0),
    "insertion_aopc": Shape("Insertion AOPC ↓", "probability", 1, 0, -1),
    # TokenTM, Equations 1 and 2 of the supplement
    "aopc": Shape("AOPC ↑", "probability", 1, -1, 0, mean=True),
    "log_odds": Shape("LOdds ↓", "log_probability", -1, 1, 0, mean=True),
    # Chefer et al., 2021: accuracy when the most (positive) or the least (negative) important pixels are removed. The
    # preset metrics=chefer sets the steps and the range of the area
    "positive_perturbation": Shape("Positive perturbation ↓", "correct", 0, 1, 0),
    "negative_perturbation": Shape("Negative perturbation ↑", "correct", 0, 0, 1),
}
"""Name → curve. All curves are computed from the same masked forward passes."""


@checks_choices
def find_needed_sides(curves: Sequence[Curve]) -> tuple[bool, bool]:
    """Whether any of the curves needs the outputs without S*, and whether any needs those with S* only."""
    return any(CURVES[name].removed for name in curves), any(CURVES[name].preserved for name in curves)
