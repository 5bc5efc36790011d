"""What explainers measure of each image while they explain it: masks, their similarity, and overdetermined classes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from explainers.metrics.means import MeanOfImages
from explainers.metrics.optional import MetricCollection

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


class Number(MeanOfImages):
    """Mean over images of one of the `NUMBERS`."""

    def update(self, values: Tensor) -> None:
        """Add the numbers of some images, (B,)."""
        self.add(values.float())


class Numbers(MetricCollection):
    """Means over images of the `NUMBERS` of an explainer; NaN for what it does not measure.

    >>> import torch
    >>> metric = Numbers()
    >>> metric.add({"masks": torch.tensor([60, 70])})
    >>> metric["masks"].compute().item(), metric["masks"].standard_error().item()
    (65.0, 5.0)
    """

    def __init__(self) -> None:
        # Compute groups would merge metrics whose states happen to be equal after the first batch
        super().__init__({name: Number() for name in NUMBERS}, compute_groups=False)

    def add(self, numbers: Mapping[str, Tensor]) -> None:
        """Add the numbers of some images, (B,) each."""
        metrics: dict[str, Any] = dict(self.items())
        for name, values in numbers.items():
            metrics[name].update(values)
