"""Networks that predict the Shapley values of all patches for all classes, (B, N, K), in one forward pass."""

import copy
from collections.abc import Sequence
from typing import Any

import timm
import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from explainers.errors import InputError, check_positive
from explainers.learned.trunk import Trunk, small_linear
from explainers.masking import PatchGrid, on_grid
from explainers.models import TargetModel
from explainers.models.inputs import zero_to_one


class LightShapleyNetwork(Trunk):
    """A `Trunk`, whose arguments it has, and a linear layer."""

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        blocks: Sequence[int],
        hops: Sequence[int] = (1,),
        width: int = 256,
        depth: int = 2,
    ) -> None:
        super().__init__(target, grid, blocks, hops, width, depth)
        self.write = small_linear(width, target.num_classes)

    def forward(self, images: Tensor, embeddings: Tensor, maps: list[Tensor]) -> Tensor:
        """Predict (B, N, K) from embeddings (B, D) and feature maps (B, N', C); `images` are not used."""
        return self.write(self.tokens(embeddings, maps))


class ViTShapleyNetwork(nn.Module):
    """A copy of the target's ViT, a self-attention block, and a three-layer MLP on every patch (Covert et al., 2022).

    The input of the block is the normalised tokens of the ViT, including the class token. The block does not normalise
    them again.

    Args:
        freeze: read the features of the frozen target, which can be cached, instead of training a copy of its ViT.
        ratio: width of the MLP, as a multiple of the width of the ViT.
        tanh: limit the values to [−1, 1], before they are normalised.

    Raises:
        InputError: if the target is not a ViT, or its patches are not those of the grid.
    """

    def __init__(
        self, target: TargetModel, grid: PatchGrid, freeze: bool = False, ratio: int = 4, tanh: bool = True
    ) -> None:
        super().__init__()
        check_positive(ratio=ratio)
        vit = target.backbone
        sides = vit.patch_embed.grid_size if isinstance(vit, VisionTransformer) else None
        if sides != grid.shape:
            actual = "not a timm ViT" if sides is None else f"a ViT with {sides[0]} × {sides[1]} patches"
            raise InputError(
                f"ViT-Shapley needs a timm ViT with the grid's {grid.shape[0]} × {grid.shape[1]} patches, and"
                f" {target.name} is {actual}: take the light network or FastSHAP's"
            )
        self.freeze = freeze
        self.ratio = ratio
        self.tanh = tanh
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
        """Predict (B, N, K), from uint8 images (B, C, H, W), or with `freeze` from the features of the target."""
        if self.own is not None:
            embeddings, maps = self.own.embed_with_maps(self.own.normalise(images), self.last)
        patches = self.norm(maps[0])  # (B, N, D)
        prefix = embeddings.unflatten(-1, (-1, patches.shape[-1]))  # (B, 1, D), or (B, 2, D) for a distilled DeiT
        return self.write(self.attention(torch.cat([prefix, patches], 1))[:, prefix.shape[1] :])


class FastSHAPNetwork(nn.Module):
    """A convolutional network on the pixels, and a linear layer on one of its feature maps (Jethani et al., 2021).

    Args:
        backbone: name of a timm model with stages; the deepest feature map that is not coarser than the grid is used.
        pretrained: start from the weights that timm provides.
    """

    blocks: tuple[int, ...] = ()
    initial = ("pretrained",)  # arguments that choose initial weights
    mean: Tensor
    std: Tensor

    def __init__(
        self, target: TargetModel, grid: PatchGrid, backbone: str = "resnet18", pretrained: bool = False
    ) -> None:
        super().__init__()
        all_stages: Any = timm.create_model(backbone, features_only=True)
        fine = [i for i, reduction in enumerate(all_stages.feature_info.reduction()) if reduction <= grid.patch_size]
        if not fine:
            raise InputError(f"{backbone} has no map as fine as patches of {grid.patch_size} pixels: take larger ones")
        network: Any = timm.create_model(backbone, pretrained=pretrained, features_only=True, out_indices=fine[-1:])
        self.backbone = backbone
        self.features = network
        self.shape = grid.shape
        self.write = small_linear(network.feature_info.channels()[-1], target.num_classes)
        config = timm.data.resolve_model_data_config(network)
        self.register_buffer("mean", torch.tensor(config["mean"])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(config["std"])[:, None, None], persistent=False)

    def forward(self, images: Tensor, embeddings: Tensor | None = None, maps: list[Tensor] | None = None) -> Tensor:
        """Predict (B, N, K) from uint8 images (B, C, H, W); the other arguments are not used."""
        (features,) = self.features((zero_to_one(images) - self.mean) / self.std)
        return self.write(on_grid(features.flatten(2).mT, self.shape))
