"""Random heatmaps, which tables compare with."""

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
    """

    forward_passes = 0
    ignores_classes = True
    signed = False

    def __init__(self, target: TargetModel, grid: PatchGrid, seed: int = 0) -> None:
        super().__init__()
        self.grid = grid
        self.seed = seed

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Draw heatmaps (B, rows, columns) for uint8 images (B, C, H, W); the classes (B,) have no influence."""
        self.grid.check(images)
        # The seed depends on the image only, so that the other images of the batch have no influence
        seeds = images.flatten(1).sum(1, dtype=torch.long) + self.seed
        generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        scores = [torch.rand(self.grid.shape, generator=generator, dtype=torch.float32) for generator in generators]
        return torch.stack(scores).to(images.device)
