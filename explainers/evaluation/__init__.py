"""Measures explainers on images."""

from typing import TYPE_CHECKING

from explainers import import_at_use

if TYPE_CHECKING:
    from explainers.evaluation.evaluation import Evaluation
    from explainers.evaluation.evaluation_module import EvaluationModule
else:  # at first use: the modules need Lightning, the others torchmetrics
    __getattr__ = import_at_use(__name__, "evaluation", "evaluation_module")

__all__ = ["Evaluation", "EvaluationModule"]
