"""The base classes of metrics: torchmetrics', or stand-ins without it, so that the formulas can be imported."""

from typing import Any

from torch import nn

from explainers.errors import needs


class Missing(nn.Module):
    """Stands for a class of torchmetrics, which only the accumulation over batches needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        needs("torchmetrics", "methods", type(self).__name__)
        super().__init__()


try:
    from torchmetrics import Metric, MetricCollection
except ModuleNotFoundError:
    Metric = MetricCollection = Missing  # type: ignore[assignment, misc]

__all__ = ["Metric", "MetricCollection"]
