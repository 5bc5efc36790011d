"""Means over images with standard errors, and a dictionary of the values of several metrics."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanOfImages(Metric):
    """Mean over images of one number per image, with its standard error. Images whose number is NaN are left out."""

    full_state_update = False
    higher_is_better = True
    total: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "squares", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.double), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Add the numbers of some images, (B,)."""
        values = values[~values.isnan()].double()
        self.total += values.sum()
        self.squares += values.square().sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        return (self.total / self.count).float()

    def standard_error(self) -> Tensor:
        """Return the standard error of the mean, over the images of all processes; NaN for a single image."""
        with self.sync_context():
            variance = (self.squares / self.count - (self.total / self.count).square()).clamp(min=0)
            return (variance / (self.count - 1)).sqrt().float()


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Compute several metrics: name → number, with standard errors as `<name>_error`; NaN is left out.

    Args:
        metrics: name → metric. A metric that computes a dictionary names its numbers by the keys.
    """
    computed: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        computed |= value if isinstance(value, dict) else {name: value}
        if isinstance(metric, MeanOfImages):
            computed[f"{name}_error"] = metric.standard_error()
    plain = {name: value.tolist() for name, value in computed.items()}
    return {name: value for name, value in plain.items() if value == value}
