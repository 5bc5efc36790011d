"""Measures explainers on data sets."""

from typing import TYPE_CHECKING

from explainers import imported_at_use

if TYPE_CHECKING:
    from explainers.evaluation.evaluation import Evaluation

# It needs Lightning; `explainers benchmark`, which needs the sweep alone, does without
__getattr__ = imported_at_use(__name__, {"Evaluation": "explainers.evaluation.evaluation"})

__all__ = ["Evaluation"]
