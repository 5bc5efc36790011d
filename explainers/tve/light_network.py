"""The light network, which predicts the meta-attribution (g, h) of every patch from features of the target."""

from collections.abc import Sequence

import torch
from torch import Tensor

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.training.trunk import Trunk, small_linear


class LightNetwork(Trunk):
    """A `Trunk`, whose arguments it has, and a linear layer.

    One forward pass of the target gives both prediction and explanation. The network predicts corrections to trivial
    guesses of g and h: the mean g, and the embedding of the whole image for h. The unit of a correction is the standard
    deviation of g or h from its guess, for each channel (`calibrate`).
    """

    mean_g: Tensor
    scale: Tensor

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        blocks: Sequence[int],
        hops: Sequence[int] = (2,),
        width: int = 256,
        depth: int = 2,
    ) -> None:
        super().__init__(target, grid, blocks, hops, width, depth)
        self.write = small_linear(width, 2 * target.embed_dim)
        self.register_buffer("mean_g", torch.zeros(target.embed_dim))
        self.register_buffer("scale", torch.ones(2, target.embed_dim))

    def forward(
        self, images: Tensor | None, embeddings: Tensor, maps: list[Tensor], patches: Tensor | None = None
    ) -> Tensor:
        """Predict meta-attributions.

        Args:
            images: uint8, (B, C, H, W); not used, because every network of TVE is called with the same arguments.
            embeddings: embeddings of the whole images, (B, D).
            maps: feature maps of the `blocks`, (B, N', C) each.
            patches: indices of the patches to predict, (B, Z); `None` for all N.

        Returns:
            g and h of each patch, (B, N, 2, D), or (B, Z, 2, D) for given `patches`.
        """
        tokens = self.tokens(embeddings, maps, patches)
        correction = self.write(tokens).unflatten(-1, (2, -1)) * self.scale  # (B, N or Z, 2, D)
        guess = torch.stack([self.mean_g.expand_as(embeddings), embeddings], 1)  # (B, 2, D)
        return guess[:, None] + correction

    @torch.no_grad()
    def calibrate(self, meta: Tensor, embedding: Tensor) -> None:
        """Set the mean g and the units of the corrections.

        Args:
            meta: exact meta-attributions (g, h) of the first training batch, (B, Z, 2, D).
            embedding: embeddings of its images, (B, D).
        """
        g, h = meta.float().unbind(2)
        self.mean_g.copy_(g.mean((0, 1)))
        spread = torch.stack([g - self.mean_g, h - embedding[:, None]]).square().mean((1, 2)).sqrt()  # (2, D)
        self.scale.copy_(torch.where(spread > 0, spread, 1))  # with a scale of 0, the weights would get no gradient
