"""Measures explainers on data sets, and writes the results to tables and figures."""

from explainers.evaluation.approximation import TwoPointStudy
from explainers.evaluation.module import Evaluation
from explainers.evaluation.pictures import Pictures
from explainers.evaluation.report import Reference
from explainers.evaluation.results import read_results

__all__ = ["Evaluation", "Pictures", "Reference", "TwoPointStudy", "read_results"]
