"""Overdetermined classes: masks whose causal impact says little of where the class is (ViT-CX, Section 3.4)."""

from collections.abc import Sequence

import torch
from torch import Tensor

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
