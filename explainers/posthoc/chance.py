"""Random heatmaps: the baseline that any explainer must beat."""

import torch
from torch import Tensor, nn

from explainers.masking import PatchGrid
from explainers.target import TargetModel


class Chance(nn.Module):
    """Independent uniform scores, the same ones whenever the same image is explained.

    Args:
        target: not used; every explainer is built from one.
        grid: the patches that are scored.
        seed: another one gives other scores.
    """

    forward_passes = 0
    ignores_classes = True

    def __init__(self, target: TargetModel, grid: PatchGrid, seed: int = 0) -> None:
        super().__init__()
        self.grid, self.seed = grid, seed

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Score uint8 images (B, C, H, W), whatever the classes (B,): heatmaps (B, P, P)."""
        # Seeds depend on the image alone, so that its batch does not matter
        seeds = images.flatten(1).sum(1, dtype=torch.long) + self.seed
        scores = [
            torch.rand(self.grid.num_patches, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds
        ]
        return torch.stack(scores).to(images.device).unflatten(-1, (self.grid.side, -1))
