"""Makes tables, figures and the gallery of results and heatmaps in files, and copies them to Weights & Biases."""

from explainers.report.pictures import Pictures
from explainers.report.tables import Reference

__all__ = ["Pictures", "Reference"]
