"""Measures explainers on data sets, and keeps the results."""

from explainers.evaluation.approximation import TwoPointStudy
from explainers.evaluation.evaluation import Evaluation
from explainers.evaluation.results import read_results

__all__ = ["Evaluation", "TwoPointStudy", "read_results"]
