"""Networks that predict the Shapley values of every patch for all classes at once (see `networks`)."""

import copy
from collections.abc import Sequence
from typing import Any

import timm
import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.networks.light import Trunk, on_grid, small_linear
from explainers.target import TargetModel


class LightShapleyNetwork(nn.Module):
    """A small network on what the target itself saw around each patch.

    Args:
        blocks, hops, width, depth: see `Trunk`.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        blocks: Sequence[int],
        hops: Sequence[int] = (1,),
        width: int = 256,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.trunk = Trunk(target, grid, blocks, hops, width, depth)
        self.write = small_linear(width, target.num_classes)

    def forward(self, images: Tensor, embeddings: Tensor, maps: list[Tensor]) -> Tensor:
        return self.write(self.trunk(embeddings, maps))


class ViTShapleyNetwork(nn.Module):
    """The target's own ViT, then a self-attention block and a three-layer MLP on every patch (Covert et al., 2022).

    The block gets the normalised tokens of the ViT, its class token among them, and does not normalise them again.

    Args:
        freeze: leave the ViT as it is and read the target's features, which can be stored, instead of training a copy.
        ratio: width of the MLP, in widths of the ViT.
        tanh: bound the values, before their normalisation, by −1 and 1.

    Raises:
        InputError: for a target that is no ViT with the patches of the grid.
    """

    def __init__(
        self, target: TargetModel, grid: PatchGrid, freeze: bool = False, ratio: int = 4, tanh: bool = True
    ) -> None:
        super().__init__()
        vit = target.backbone
        sides = vit.patch_embed.grid_size if isinstance(vit, VisionTransformer) else None
        if sides != (grid.side, grid.side):
            found = "not a timm ViT" if sides is None else f"a ViT with {sides[0]} × {sides[1]} patches"
            raise InputError(
                f"ViT-Shapley needs a timm ViT with the grid's {grid.side} × {grid.side} patches, and {target.name} is "
                f"{found}: take the light network or FastSHAP's"
            )
        self.last = (len(vit.blocks) - 1,)
        self.blocks = self.last if freeze else ()
        self.own = None if freeze else copy.deepcopy(target).requires_grad_(True).train()
        if self.own is not None:
            self.own.head = nn.Identity()
        self.norm = copy.deepcopy(vit.fc_norm if isinstance(vit.norm, nn.Identity) else vit.norm).requires_grad_(True)
        self.attention = Block(vit.embed_dim, vit.blocks[0].attn.num_heads)
        self.attention.norm1 = nn.Identity()
        hidden = ratio * vit.embed_dim
        self.write = nn.Sequential(
            nn.LayerNorm(vit.embed_dim),
            nn.Linear(vit.embed_dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            small_linear(hidden, target.num_classes),
            nn.Tanh() if tanh else nn.Identity(),
        )

    def forward(self, images: Tensor, embeddings: Tensor, maps: list[Tensor]) -> Tensor:
        if self.own is not None:
            embeddings, maps = self.own.embed_with_maps(self.own.normalise(images), self.last)
        patches = self.norm(maps[0])  # (B, N, D)
        whole = embeddings.unflatten(-1, (-1, patches.shape[-1]))  # (B, 1, D), of a distilled DeiT (B, 2, D)
        return self.write(self.attention(torch.cat([whole, patches], 1))[:, whole.shape[1] :])


class FastSHAPNetwork(nn.Module):
    """A convolutional network on the pixels, and one linear layer on its map (Jethani et al., 2021).

    Args:
        backbone: timm's name of a network with stages. Read is its deepest map that is no coarser than the grid.
        pretrained: start from timm's weights.
    """

    blocks: tuple[int, ...] = ()
    mean: Tensor
    std: Tensor

    def __init__(
        self, target: TargetModel, grid: PatchGrid, backbone: str = "resnet18", pretrained: bool = False
    ) -> None:
        super().__init__()
        stages: Any = timm.create_model(backbone, features_only=True)
        fine = [i for i, reduction in enumerate(stages.feature_info.reduction()) if reduction <= grid.patch_size]
        if not fine:
            raise InputError(f"{backbone} has no map as fine as patches of {grid.patch_size} pixels: take larger ones")
        read: Any = timm.create_model(backbone, pretrained=pretrained, features_only=True, out_indices=fine[-1:])
        self.backbone, self.side = read, grid.side
        self.write = small_linear(read.feature_info.channels()[-1], target.num_classes)
        config = timm.data.resolve_model_data_config(read)
        self.register_buffer("mean", torch.tensor(config["mean"])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(config["std"])[:, None, None], persistent=False)

    def forward(self, images: Tensor, embeddings: Tensor | None = None, maps: list[Tensor] | None = None) -> Tensor:
        (features,) = self.backbone((images.float() / 255 - self.mean) / self.std)
        return self.write(on_grid(features.flatten(2).mT, self.side))
