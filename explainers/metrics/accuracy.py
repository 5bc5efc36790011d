"""Accuracy of classifiers on images of which some may have no label."""

from torch import Tensor
from torchmetrics import MeanMetric


class Accuracy(MeanMetric):
    """Fraction of labelled images whose predicted class is their label; NaN without labelled images.

    >>> import torch
    >>> metric = Accuracy()
    >>> metric.update(torch.tensor([0, 1, 2]), torch.tensor([0, 0, -1]))  # the last image has no label
    >>> metric.compute().item()
    0.5
    """

    higher_is_better = True  # type: ignore[assignment]
    column = "Accuracy ↑"

    def update(self, predicted: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        """Add images, by their predicted classes (B,) and their labels (B,), where −1 is an image without a label."""
        super().update((predicted == labels)[labels >= 0].float())
