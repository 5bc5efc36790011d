"""The light network: it predicts the meta-attribution (g, h) of every patch from features of the target itself."""

import math
from collections.abc import Sequence

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.masking import PatchGrid, neighbourhoods
from explainers.target import TargetModel


def at_patches(tokens: Tensor, patches: Tensor | None) -> Tensor:
    """Of tokens (B, N, ...) those of the patches (B, Z), in their order: (B, Z, ...); or all of them."""
    return tokens if patches is None else tokens[torch.arange(len(tokens), device=tokens.device)[:, None], patches]


def on_grid(feature_map: Tensor, side: int) -> Tensor:
    """A feature map (B, N', C) at the resolution of the patches: (B, N, C)."""
    own = math.isqrt(feature_map.shape[1])
    if own == side:
        return feature_map
    square = feature_map.float().mT.unflatten(-1, (own, own))
    return F.interpolate(square, (side, side), mode="bilinear", antialias=True).flatten(2).mT


def small_linear(width_in: int, width: int) -> nn.Linear:
    """A last layer that starts near 0, so that a network starts near its trivial guess."""
    layer = nn.Linear(width_in, width)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


class Trunk(nn.Module):
    """What the target saw around every patch, as tokens (B, N, width): features of several blocks, averaged over N(z).

    The average is what makes few training images suffice: g is what the backbone sees of N(z) and of nothing else.
    An MLP mixes the channels. Patches are mixed by the average alone, so that a training step costs no more than the
    patches that it draws. Feature maps of another resolution are resampled to the grid.

    Args:
        blocks: whose outputs it reads: transformer blocks, or the stages of Swin and ResNet.
        hops: the size of N(z); of several sizes, the largest.
        width, depth: of the tokens, and the number of residual layers.
    """

    near: Tensor

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        blocks: Sequence[int],
        hops: Sequence[int],
        width: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.side = grid.side
        near = neighbourhoods(grid, max(hops)).float()
        self.register_buffer("near", near / near.sum(-1, keepdim=True), persistent=False)
        channels = [*target.map_channels(blocks), target.embed_dim]
        self.read = nn.ModuleList(nn.Sequential(nn.LayerNorm(c), nn.Linear(c, width)) for c in channels)
        self.position = nn.Parameter(torch.randn(grid.num_patches, width) * 0.02)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), Mlp(width, 2 * width)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, embeddings: Tensor, maps: list[Tensor], patches: Tensor | None = None) -> Tensor:
        *read_maps, read_embedding = self.read
        tokens = at_patches(self.position.expand(len(embeddings), -1, -1), patches)  # (B, N or Z, width)
        tokens = tokens + read_embedding(embeddings)[:, None]
        for read, feature_map in zip(read_maps, maps, strict=True):
            tokens = tokens + read(self._around(feature_map, patches))
        for layer in self.layers:
            tokens = tokens + layer(tokens)
        return self.norm(tokens)

    def _around(self, feature_map: Tensor, patches: Tensor | None) -> Tensor:
        """A feature map (B, N', C) averaged over N(z): (B, N or Z, C). Pooling would be several times slower."""
        near = self.near if patches is None else self.near[patches]  # (N, N) or (B, Z, N)
        return near @ on_grid(feature_map, self.side)


class LightNetwork(nn.Module):
    """A `Trunk` on the target's patch features: one target forward serves prediction and explanation.

    Predicts g and h as corrections to their trivial guesses, the mean g and the embedding of the whole image, in units
    of their standard deviation (`calibrate`).

    Args:
        blocks, hops, width, depth: see `Trunk`.
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
        super().__init__()
        self.blocks = tuple(blocks)
        self.trunk = Trunk(target, grid, blocks, hops, width, depth)
        self.write = small_linear(width, 2 * target.embed_dim)
        self.register_buffer("mean_g", torch.zeros(target.embed_dim))
        self.register_buffer("scale", torch.ones(2, target.embed_dim))

    def forward(
        self, images: Tensor | None, embeddings: Tensor, maps: list[Tensor], patches: Tensor | None = None
    ) -> Tensor:
        correction = (
            self.write(self.trunk(embeddings, maps, patches)).unflatten(-1, (2, -1)) * self.scale
        )  # (B, N, 2, D)
        guess = torch.stack([self.mean_g.expand_as(embeddings), embeddings], 1)  # (B, 2, D)
        return guess[:, None] + correction

    @torch.no_grad()
    def calibrate(self, meta: Tensor, embedding: Tensor) -> None:
        """Set the trivial guesses and the units of the corrections from a first batch, (B, Z, 2, D) and (B, D)."""
        g, h = meta.float().unbind(2)
        self.mean_g.copy_(g.mean((0, 1)))
        spread = torch.stack([g - self.mean_g, h - embedding[:, None]]).square().mean((1, 2)).sqrt()  # (2, D)
        self.scale.copy_(torch.where(spread > 0, spread, 1))  # a scale of 0 could never learn
