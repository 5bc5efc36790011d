"""Cost of explanations: time, memory and forward passes."""

import torch
from torch import Tensor

from explainers.metrics.optional import Metric


class Cost(Metric):
    """Images that one process explains per second, and the peak GPU memory.

    `compute` returns `images_per_second`, which is NaN before the first update, and `peak_memory` in GB, if known.

    >>> metric = Cost()
    >>> metric.update(images=10, seconds=2.0)
    >>> metric.compute()["images_per_second"].item()
    5.0
    """

    columns = {"images_per_second": "Images/s ↑", "peak_memory": "Peak memory, GB ↓"}
    higher_is_better = None  # differs between the numbers
    is_differentiable = False
    full_state_update = False
    seconds: Tensor
    images: Tensor
    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seconds", torch.zeros((), dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("images", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("memory", torch.zeros((), dtype=torch.double), dist_reduce_fx="max")

    def update(self, images: int, seconds: float, memory: float = 0.0) -> None:
        """Add a call of the explainer.

        Args:
            images: number of explained images.
            seconds: duration of the call.
            memory: peak GPU memory, in GB; 0 if unknown.
        """
        self.images += images
        self.seconds += seconds
        self.memory = torch.maximum(self.memory, torch.tensor(memory, dtype=torch.double, device=self.memory.device))

    def compute(self) -> dict[str, Tensor]:
        costs = {"images_per_second": self.images / self.seconds}
        return costs | {"peak_memory": self.memory} if self.memory > 0 else costs


class Passes(Metric):
    """Forward passes of the target for each explained image, rounded to an integer.

    >>> metric = Passes()
    >>> metric.update(images=8, passes=8 * 100 + 1)  # the 1 is a blank image, embedded once for the batch
    >>> metric.compute().item()
    100
    """

    column = "Passes ↓"
    higher_is_better = False
    is_differentiable = False
    full_state_update = False
    images: Tensor
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("images", "passes"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, images: int, passes: int) -> None:
        """Add a call of the explainer.

        Args:
            images: number of explained images.
            passes: number of images that the target processed.
        """
        self.images += images
        self.passes += passes

    def compute(self) -> Tensor:
        return (self.passes / self.images.clamp(min=1)).round().long()
