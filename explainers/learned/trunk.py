"""The trunk of light networks: a token of every patch, from features of the target."""

from collections.abc import Callable, Sequence

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from explainers.errors import check_positive
from explainers.masking import PatchGrid, check_hops, neighbourhoods, on_grid
from explainers.models import TargetModel


def at_patches(tokens: Tensor, patches: Tensor | None) -> Tensor:
    """Select the tokens (B, N, ...) of patches with the indices (B, Z): (B, Z, ...); `None` for all of them.

    >>> at_patches(torch.tensor([[[0, 1], [2, 3], [4, 5]]]), torch.tensor([[2, 0]])).tolist()
    [[[4, 5], [0, 1]]]
    """
    return tokens if patches is None else tokens[torch.arange(len(tokens), device=tokens.device)[:, None], patches]


Decomposition = tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""Embeddings (B, D); a function of functionals v (B, V, D) → v · c_z (B, V, N); one of patches (B, P) → their vectors
c_z (B, P, D)."""


def decompose_all(vectors: Tensor, embeddings: Tensor) -> Decomposition:
    """The decomposition of images whose vectors (B, N, D) are all computed."""
    return embeddings, lambda functionals: functionals @ vectors.mT, lambda patches: at_patches(vectors, patches)


def default_blocks(target: TargetModel) -> list[int]:
    """Return the blocks that a light network reads by default: all of up to 12, `space_blocks(target, 6)` of more."""
    count = len(list(getattr(target.backbone, "feature_info", [])))
    return space_blocks(target, count if count <= 12 else 6)


def space_blocks(target: TargetModel, count: int) -> list[int]:
    """Return `count` evenly spaced blocks of a transformer with the last one, as timm's `forward_intermediates` numbers
    them; of a model whose maps have several sizes, such as a Swin or ResNet, the last three stages.

    >>> import timm
    >>> space_blocks(TargetModel(timm.create_model("test_resnet", num_classes=2)), count=4)
    [2, 3, 4]
    >>> space_blocks(TargetModel(timm.create_model("test_vit", num_classes=2)), count=4)
    [1, 2, 3, 5]
    """
    stages = list(range(len(list(getattr(target.backbone, "feature_info", [])))))
    if target.patch_size is None:
        return stages[-3:]
    count = min(count, len(stages))
    return [round(len(stages) * part / count) - 1 for part in range(1, count + 1)]


def small_linear(width_in: int, width: int) -> nn.Linear:
    """Build a last layer with outputs near 0, so that the untrained network predicts nearly its trivial guess."""
    layer = nn.Linear(width_in, width)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


class Trunk(nn.Module):
    """Computes a token of every patch z, (B, N, width), from features of the target, averaged over N(z).

    The average over N(z) makes few training images suffice, because g depends on the patches in N(z) only. MLPs mix the
    channels. Only the average mixes patches, so that a training step computes only the patches that it draws. Feature
    maps of another resolution are resampled to the grid.

    Args:
        target: the model to explain.
        grid: the patches of an image.
        blocks: indices of the blocks whose outputs are read: transformer blocks, or the stages of Swin and ResNet.
        hops: possible radii of N(z), in patches; the largest is used.
        width: width of the tokens, in channels.
        depth: number of residual layers.
    """

    near: Tensor

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
        check_hops(hops)
        check_positive(width=width, depth=depth)
        self.blocks = tuple(blocks)
        self.hops = tuple(hops)
        self.width = width
        self.depth = depth
        self.shape = grid.shape
        near = neighbourhoods(grid, max(hops)).float()
        self.register_buffer("near", near / near.sum(-1, keepdim=True), persistent=False)
        channels = [*target.map_channels(blocks), target.embed_dim]
        self.read = nn.ModuleList(nn.Sequential(nn.LayerNorm(c), nn.Linear(c, width)) for c in channels)
        self.position = nn.Parameter(torch.randn(grid.num_patches, width) * 0.02)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), Mlp(width, 2 * width)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def tokens(self, embeddings: Tensor, maps: list[Tensor], patches: Tensor | None = None) -> Tensor:
        """Compute the tokens of all patches, (B, N, width), or of given patches, (B, Z, width)."""
        *read_maps, read_embedding = self.read
        tokens = at_patches(self.position.expand(embeddings.shape[0], -1, -1), patches)  # (B, N or Z, width)
        tokens = tokens + read_embedding(embeddings)[:, None]
        for read, feature_map in zip(read_maps, maps, strict=True):
            tokens = tokens + read(self._around(feature_map, patches))
        for layer in self.layers:
            tokens = tokens + layer(tokens)
        return self.norm(tokens)

    def _around(self, feature_map: Tensor, patches: Tensor | None) -> Tensor:
        """Average a feature map (B, N', C) over N(z): (B, N or Z, C).

        A matrix product, because pooling is several times slower.
        """
        near = self.near if patches is None else self.near[patches]  # (N, N) or (B, Z, N)
        return near @ on_grid(feature_map, self.shape)
