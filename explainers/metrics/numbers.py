"""What explainers measure of each image while they explain it: masks, their similarity, and overdetermined classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from explainers.metrics.means import MeanOfImages

NUMBERS = {
    "masks": "Masks",
    "mask_similarity": "mSim",
    "overdetermined": "Overdetermined",
    "impact_variance": "Variance of impacts",
}
"""Name of a number in `Details.numbers` → title of its column (ViT-CX, Tables 1 and 2, Figure 4 and Section 3.4).

`masks` counts the masks of an image; `mask_similarity` is the mean cosine of all pairs of its feature maps as masks;
for the others, see `overdetermination`.
"""

OVERDETERMINED = 0.9
"""Mean causal impact of an image's masks above which its class is overdetermined."""


def overdetermination(scores: Sequence[Tensor]) -> dict[str, Tensor]:
    """Compute whether the mean causal impact μ of an image's masks is above 0.9 (ViT-CX, Section 3.4).

    Args:
        scores: causal impacts of the masks of each image, (M,) each.

    Returns:
        `overdetermined`, 1 if μ > 0.9, otherwise 0; and `impact_variance`, the variance of the impacts, NaN unless the
        image is overdetermined. (B,) each; NaN for an image without masks.

    >>> numbers = overdetermination([torch.tensor([1.0, 0.9]), torch.tensor([0.5])])
    >>> numbers["overdetermined"].tolist(), numbers["impact_variance"].tolist()
    ([1.0, 0.0], [0.0025..., nan])
    """
    means = torch.stack([each.mean() for each in scores])
    variances = torch.stack([(each - each.mean()).square().mean() for each in scores])
    overdetermined = means > OVERDETERMINED
    return {
        "overdetermined": overdetermined.float().masked_fill(means.isnan(), torch.nan),
        "impact_variance": variances.masked_fill(~overdetermined, torch.nan),
    }


class Number(MeanOfImages):
    """Mean over images of one of the `NUMBERS`."""

    def update(self, values: Tensor) -> None:
        """Add the numbers of some images, (B,)."""
        self.add(values.float())


class Numbers(MetricCollection):
    """Means over images of the `NUMBERS` of an explainer; NaN for what it does not measure.

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
