"""The exact attribution that TVE learns to predict: the upper bound of what it can reach."""

import torch
from torch import Tensor, nn

from explainers.masking import PatchGrid, neighbourhoods
from explainers.target import TargetModel
from explainers.tve import meta_attribution, transfer


class Oracle(nn.Module):
    """Equation 6 with every meta-attribution computed: 2·N masked forward passes of the target for each image.

    Args:
        chunk_size: masked images in memory at a time.
    """

    near: Tensor

    def __init__(self, target: TargetModel, grid: PatchGrid, hops: int = 2, chunk_size: int = 256) -> None:
        super().__init__()
        self.target, self.grid, self.chunk_size = target.eval(), grid, chunk_size
        self.register_buffer("near", neighbourhoods(grid, hops), persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        near = self.near.expand(len(images), -1, -1)
        meta = meta_attribution(self.target.embed, self.target.normalise(images), near, self.grid, self.chunk_size)
        heatmaps = transfer(self.target.classify, meta)[torch.arange(len(images)), classes]  # (B, N)
        return heatmaps.unflatten(-1, (self.grid.side, -1))
