"""The network of the TVE paper: masked autoencoders with heads of FFN layers on them (Appendix H)."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.networks.light import at_patches
from explainers.target import TargetModel

log = logging.getLogger(__name__)
NORM: Any = partial(nn.LayerNorm, eps=1e-6)  # as in the official masked autoencoder


class MaskedAutoencoder(nn.Module):
    """A masked autoencoder's encoder and decoder (He et al., 2022) with nothing masked, up to the decoder's tokens.

    Attributes are named as in the official checkpoints, so that their weights load by name.
    """

    def __init__(
        self,
        grid: PatchGrid,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
    ) -> None:
        super().__init__()
        self.encoder = VisionTransformer(
            grid.image_size, grid.patch_size, num_classes=0, embed_dim=width, depth=depth, num_heads=heads
        )
        self.encoder.pos_embed = nn.Parameter(sincos_positions(grid, width))
        self.decoder_embed = nn.Linear(width, decoder_width)
        self.decoder_pos_embed = nn.Parameter(sincos_positions(grid, decoder_width), requires_grad=False)
        self.decoder_blocks = nn.Sequential(
            *(Block(decoder_width, decoder_heads, qkv_bias=True, norm_layer=NORM) for _ in range(decoder_depth))
        )
        self.decoder_norm = NORM(decoder_width)

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) → patch tokens (B, N, decoder_width); the class token is dropped."""
        tokens = self.decoder_embed(self.encoder.forward_features(images)) + self.decoder_pos_embed
        return self.decoder_norm(self.decoder_blocks(tokens))[:, 1:]

    def load(self, weights: str) -> None:
        """Load a local MAE checkpoint (official names, torch), or the timm model of this name: the encoder only.

        Raises:
            InputError: for weights of another size, or of something else.
        """
        if Path(weights).is_file():
            saved = torch.load(weights, map_location="cpu", weights_only=True)
            saved = saved.get("model", saved)
        else:
            saved = timm.create_model(weights, pretrained=True, num_classes=0).state_dict()
        skipped = ("mask_token", "decoder_pred.weight", "decoder_pred.bias")  # they only serve reconstruction
        own = {
            name if name.startswith("decoder_") else f"encoder.{name}": value
            for name, value in saved.items()
            if name not in skipped
        }
        shapes = {name: value.shape for name, value in self.state_dict().items()}
        for name, value in own.items():
            if shapes.get(name) != value.shape:
                raise InputError(
                    f"{weights} is not a masked autoencoder of this size: its {name} is {list(value.shape)}, "
                    f"this one's is {list(shapes[name]) if name in shapes else 'missing'}"
                )
        missing, _ = self.load_state_dict(own, strict=False)
        if missing:
            log.warning(
                "%s does not initialise %d tensors, %s to %s: they start random",
                weights,
                len(missing),
                missing[0],
                missing[-1],
            )


def sincos_positions(grid: PatchGrid, width: int) -> Tensor:
    """Fixed sine-cosine position embeddings, columns first as in MAE, 0 for the class token: (1, 1 + N, width)."""
    patches = build_sincos2d_pos_embed([grid.side, grid.side], width, interleave_sin_cos=True).roll(width // 2, -1)
    return torch.cat([torch.zeros(1, width), patches])[None]


class FFN(nn.Module):
    """One layer of the explainer's head: LayerNorm, linear, GELU, linear, GELU, skip connection (TVE, Figure 10 b).

    Args:
        tokens: mix this many tokens in the second linear layer, as the released code does; 0 keeps to channels.
    """

    def __init__(self, width_in: int, width: int, tokens: int = 0, activation: bool = True, skip: bool = True) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width_in), nn.Linear(width_in, width)
        self.second = nn.Linear(tokens or width, tokens or width)
        self.activation = nn.GELU() if activation else nn.Identity()
        self.tokens, self.skip = tokens, skip

    def forward(self, features: Tensor) -> Tensor:
        """(B, N, width_in) → (B, N, width)."""
        hidden = self.activation(self.first(self.norm(features)))
        hidden = self.second(hidden.mT).mT if self.tokens else self.second(hidden)
        return self.activation(hidden) + features if self.skip else self.activation(hidden)


class PaperNetwork(nn.Module):
    """The paper's explainer: for each of g and h a masked autoencoder and `head_layers` FFN layers (TVE, Appendix H).

    The first layer has no skip connection, for its shapes differ, and the last no GELU.

    Args:
        mae: initial weights of the autoencoders: a local checkpoint or a timm name; `None` starts from random ones.
        shared_trunk: one autoencoder for both g and h, at half the cost.
        token_mixing: the released code's head: its layers mix tokens, its first and last have neither GELU nor skip.
    """

    blocks: tuple[int, ...] = ()
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        mae: str | None = None,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        head_layers: int = 17,
        token_mixing: bool = False,
        shared_trunk: bool = False,
    ) -> None:
        super().__init__()
        self.autoencoders = nn.ModuleList(
            MaskedAutoencoder(grid, width, depth, heads, decoder_width, decoder_depth, decoder_heads)
            for _ in range(1 if shared_trunk else 2)
        )
        if mae is not None:
            for autoencoder in self.autoencoders:
                autoencoder.load(mae)  # type: ignore[operator]
        tokens = grid.num_patches if token_mixing else 0
        self.heads = nn.ModuleList(
            nn.Sequential(*ffn_layers(decoder_width, target.embed_dim, head_layers, tokens)) for _ in range(2)
        )
        self.register_buffer("mean", torch.tensor(timm.data.IMAGENET_DEFAULT_MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(timm.data.IMAGENET_DEFAULT_STD)[:, None, None], persistent=False)

    def forward(
        self,
        images: Tensor,
        embeddings: Tensor | None = None,
        maps: list[Tensor] | None = None,
        patches: Tensor | None = None,
    ) -> Tensor:
        normalised = (images.float() / 255 - self.mean) / self.std
        tokens = [autoencoder(normalised) for autoencoder in self.autoencoders]
        return at_patches(torch.stack([self.heads[0](tokens[0]), self.heads[1](tokens[-1])], 2), patches)

    def calibrate(self, meta: Tensor, embedding: Tensor | None = None) -> None:
        """Do nothing: its heads learn the scale of the meta-attributions themselves."""


def ffn_layers(width_in: int, width: int, layers: int, tokens: int = 0) -> list[FFN]:
    """The explainer's head. Its first layer has no skip connection; its last no GELU, nor, as released, a skip."""
    first = FFN(width_in, width, tokens, activation=not tokens, skip=False)
    last = FFN(width, width, tokens, activation=False, skip=not tokens)
    return [first, *(FFN(width, width, tokens) for _ in range(layers - 2)), last]
