"""Makes tables, figures and the gallery from files of results and heatmaps, and logs them to Weights & Biases."""

from explainers.report.pictures import Pictures
from explainers.report.reference import Reference

__all__ = ["Pictures", "Reference"]
