"""Does the heatmap peak on the object?"""

import torch
from torch import Tensor
from torchmetrics import Metric


def hits(heatmaps: Tensor, truth: Tensor) -> Tensor:
    """The pointing game: is the centre of the most important patch on the object?

    Args:
        heatmaps: (B, P, P).
        truth: the object's pixels, boolean (B, H, W).

    Returns:
        Boolean, (B,).
    """
    side = heatmaps.shape[-1]
    best = heatmaps.flatten(1).argmax(1)
    row, column = best // side, best % side
    height, width = truth.shape[-2:]
    images = torch.arange(len(truth), device=truth.device)
    return truth[images, (2 * row + 1) * height // (2 * side), (2 * column + 1) * width // (2 * side)]


class PointingGame(Metric):
    """The share of images whose heatmap peaks on the object; images without an object's pixels do not count."""

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
        """Heatmaps (B, P, P) and the objects' pixels, boolean (B, H, W)."""
        known = truth.flatten(1).any(1)
        self.hits += hits(heatmaps, truth)[known].sum()
        self.images += known.sum()

    def compute(self) -> Tensor:
        return self.hits / self.images
