"""Measures explainers on data sets."""

from explainers.evaluation.approximation import TwoPointStudy
from explainers.evaluation.evaluation import Evaluation

__all__ = ["Evaluation", "TwoPointStudy"]
