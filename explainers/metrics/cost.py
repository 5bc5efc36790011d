"""What an explanation costs, time, memory and forward passes, and what explainers count while they explain."""

import torch
from torch import Tensor

from explainers.metrics.means import Metric

NUMBERS = {
    "masks": "Masks",
    "mask_similarity": "mSim",
    "overdetermined": "Overdetermined",
    "impact_variance": "Variance of impacts",
}
"""Name of a number in `Details.numbers` → title of its column (ViT-CX, Tables 1 and 2, Figure 4 and Section 3.4).

`masks` counts the masks of an image; `mask_similarity` is the mean cosine of all pairs of its feature maps as masks;
for the others, see `posthoc.vit_cx.overdetermination`.
"""


class Cost(Metric):
    """Images that one process explains per second, and the peak GPU memory.

    `compute` returns `images_per_second`, which is NaN before the first update, and `peak_memory` in GB, if known.
    """

    columns = {"images_per_second": "Images/s ↑", "peak_memory": "Peak memory, GB ↓"}
    higher_is_better = None  # differs between the numbers
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
        """Add a call of the explainer; `memory` is the peak of the GPU in GB, 0 if unknown."""
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
    full_state_update = False
    images: Tensor
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("images", "passes"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, images: int, passes: int) -> None:
        """Add a call of the explainer, in which the target processed `passes` images."""
        self.images += images
        self.passes += passes

    def compute(self) -> Tensor:
        return (self.passes / self.images.clamp(min=1)).round().long()
