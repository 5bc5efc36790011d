"""Accuracy of classifiers; images without a label are left out."""

from torch import Tensor

from explainers.metrics.means import Mean


class Accuracy(Mean):
    """Fraction of the labelled images that are classified correctly; NaN without labelled images.

    >>> import torch
    >>> metric = Accuracy()
    >>> metric.update(torch.tensor([0, 1, 2]), torch.tensor([0, 0, -1]))  # the last image has no label
    >>> metric.compute().item()
    0.5
    """

    higher_is_better = True
    column = "Accuracy ↑"

    def update(self, predicted: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        """Add images, given their predicted classes (B,) and their labels (B,); the label −1 means unlabelled."""
        super().update((predicted == labels)[labels >= 0].float())
