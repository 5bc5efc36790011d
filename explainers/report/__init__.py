"""Makes tables, figures and the gallery from files of results and heatmaps, and logs them to Weights & Biases."""

from typing import TYPE_CHECKING

from explainers import import_at_use

if TYPE_CHECKING:
    from explainers.report.pictures import Pictures
    from explainers.report.tables import Reference

# Both are for evaluations, which need Lightning; `overlays` does not
__getattr__ = import_at_use(__name__, "tables", "pictures")

__all__ = ["Pictures", "Reference"]
