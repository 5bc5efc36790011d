"""Random heatmaps: the baseline that every explainer must beat."""

import torch
from torch import Tensor, nn

from explainers.masking import PatchGrid
from explainers.models import TargetModel


class Chance(nn.Module):
    """Random scores, independent and uniform in [0, 1). An image gets the same scores in every call.

    Args:
        target: not used; every explainer takes this argument.
        grid: the patches of an image.
        seed: seed of the scores.

    >>> explainer, image = Chance(None, PatchGrid(4, 2)), torch.ones(1, 3, 4, 4, dtype=torch.uint8)
    >>> heatmaps = explainer(image.expand(2, -1, -1, -1), torch.tensor([0, 1]))
    >>> heatmaps.shape, torch.equal(heatmaps[0], heatmaps[1])
    (torch.Size([2, 2, 2]), True)
    """

    forward_passes = 0
    ignores_classes = True
    signed = False

    def __init__(self, target: TargetModel, grid: PatchGrid, seed: int = 0) -> None:
        super().__init__()
        self.grid = grid
        self.seed = seed

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Draw heatmaps (B, P, P) for uint8 images (B, C, H, W); the classes (B,) have no influence."""
        self.grid.check(images)
        # The seed depends on the image only, so that the other images of the batch have no influence
        seeds = images.flatten(1).sum(1, dtype=torch.long) + self.seed
        scores = [
            torch.rand(self.grid.num_patches, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds
        ]
        return torch.stack(scores).to(images.device).unflatten(-1, (self.grid.side, -1))
