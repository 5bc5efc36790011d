"""Random heatmaps: what any explainer must beat."""

import torch
from torch import Tensor, nn

from explainers.masking import PatchGrid


class Chance(nn.Module):
    """Independent uniform scores, the same ones whenever the same image is explained."""

    def __init__(self, grid: PatchGrid, seed: int = 0) -> None:
        super().__init__()
        self.grid, self.seed = grid, seed

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        seeds = (
            images.flatten(1).sum(1, dtype=torch.long) + self.seed
        )  # of the image, so that its batch does not matter
        scores = [
            torch.rand(self.grid.num_patches, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds
        ]
        return torch.stack(scores).to(images.device).unflatten(-1, (self.grid.side, -1))
