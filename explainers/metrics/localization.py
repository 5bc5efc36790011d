"""Localization: whether the most important patch lies on the object."""

import torch
from torch import Tensor
from torchmetrics import Metric


def hits(heatmaps: Tensor, truth: Tensor) -> Tensor:
    """Test whether the centre of the most important patch lies on the object (pointing game).

    Args:
        heatmaps: (B, P, P), higher is more important.
        truth: pixels of the object, boolean (B, H, W).

    Returns:
        Boolean, (B,).

    The lower right of four patches has its centre at pixel (3, 3) of an image of 4 × 4 pixels:

    >>> truth = torch.zeros(1, 4, 4, dtype=torch.bool)
    >>> truth[0, 3, 3] = True
    >>> hits(torch.tensor([[[0.1, 0.2], [0.3, 0.9]]]), truth).tolist()
    [True]
    """
    side = heatmaps.shape[-1]
    peak = heatmaps.flatten(1).argmax(1)
    row, column = peak // side, peak % side
    height, width = truth.shape[-2:]
    images = torch.arange(len(truth), device=truth.device)
    return truth[images, (2 * row + 1) * height // (2 * side), (2 * column + 1) * width // (2 * side)]


class PointingGame(Metric):
    """Hit rate: fraction of images whose most important patch lies on the object, see `hits`.

    Images with an empty `truth` are left out.

    >>> metric = PointingGame()
    >>> truth = torch.tensor([[[True, False]], [[True, False]], [[False, False]]]).repeat_interleave(2, 1)
    >>> metric.update(torch.tensor([[[9, 0], [0, 0]], [[0, 9], [0, 0]], [[9, 0], [0, 0]]]), truth)
    >>> metric.compute().item()
    0.5
    """

    column = "Hit rate ↑"
    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    hits: Tensor
    images: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("images", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, heatmaps: Tensor, truth: Tensor) -> None:
        """Add images, with the arguments of `hits`."""
        has_object = truth.flatten(1).any(1)
        self.hits += hits(heatmaps, truth)[has_object].sum()
        self.images += has_object.sum()

    def compute(self) -> Tensor:
        return self.hits / self.images
