"""The network of the TVE paper: masked autoencoders, each followed by a head of FFN layers (Appendix H)."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from explainers.errors import InputError, check_positive, check_range
from explainers.masking import PatchGrid
from explainers.target import TargetModel
from explainers.target.inputs import zero_to_one
from explainers.training.trunk import at_patches

log = logging.getLogger(__name__)
NORM: Any = partial(nn.LayerNorm, eps=1e-6)  # as in the official masked autoencoder


class MaskedAutoencoder(nn.Module):
    """Encoder and decoder of a masked autoencoder (He et al., 2022), applied to the whole image without masking.

    The output is the decoder's tokens, before the reconstruction layer. Attributes are named as in the official
    checkpoints, so that weights can be loaded by name.

    Args:
        grid: the patches of an image.
        width: width of the encoder, in channels.
        depth: number of blocks of the encoder.
        heads: number of attention heads of the encoder.
        decoder_width: width of the decoder, in channels.
        decoder_depth: number of blocks of the decoder.
        decoder_heads: number of attention heads of the decoder.
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
        check_positive(depth=depth, decoder_depth=decoder_depth)
        for name, channels, count in (("width", width, heads), ("decoder_width", decoder_width, decoder_heads)):
            if min(channels, count) <= 0 or channels % 4 or channels % count:
                raise InputError(
                    f"expected a {name} that is a multiple of 4 and of {count} heads, got {name}={channels}"
                )
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
        """Compute normalised images (B, C, H, W) → patch tokens (B, N, decoder_width), without the class token."""
        tokens = self.decoder_embed(self.encoder.forward_features(images)) + self.decoder_pos_embed
        return self.decoder_norm(self.decoder_blocks(tokens))[:, 1:]

    def load(self, weights: str) -> None:
        """Load weights of the encoder, and of the decoder where they are available.

        Args:
            weights: path of a checkpoint in the official format, or name of a timm model, which has an encoder only.

        Raises:
            InputError: for weights of another size, or of another architecture.
        """
        if Path(weights).is_file():
            saved = torch.load(weights, map_location="cpu", weights_only=True)
            saved = saved.get("model", saved)
        else:
            saved = timm.create_model(weights, pretrained=True, num_classes=0).state_dict()
        skipped = ("mask_token", "decoder_pred.weight", "decoder_pred.bias")  # needed for reconstruction only
        renamed = {
            name if name.startswith("decoder_") else f"encoder.{name}": value
            for name, value in saved.items()
            if name not in skipped
        }
        shapes = {name: value.shape for name, value in self.state_dict().items()}
        for name, value in renamed.items():
            if shapes.get(name) != value.shape:
                raise InputError(
                    f"{weights} is not a masked autoencoder of this size: its {name} is {list(value.shape)}, "
                    f"this one's is {list(shapes[name]) if name in shapes else 'missing'}"
                )
        missing, _ = self.load_state_dict(renamed, strict=False)
        if missing:
            log.warning(
                "%s does not initialise %d tensors, %s to %s: they start random",
                weights,
                len(missing),
                missing[0],
                missing[-1],
            )


def sincos_positions(grid: PatchGrid, width: int) -> Tensor:
    """Compute the fixed sine-cosine position embeddings of MAE.

    The first half of the channels encodes the column, and the second half the row. The class token has position 0.

    Args:
        grid: the patches of an image.
        width: number of channels, a multiple of 4.

    Returns:
        (1, 1 + N, width).

    The class token, and the patch of row 0 and column 0: sine and cosine of the column, then of the row:

    >>> sincos_positions(PatchGrid(image_size=2, patch_size=1), width=4)[0, :2].tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]]
    """
    patches = build_sincos2d_pos_embed([grid.side, grid.side], width, interleave_sin_cos=True).roll(width // 2, -1)
    return torch.cat([torch.zeros(1, width), patches])[None]


class FFN(nn.Module):
    """One layer of the explainer's head: LayerNorm, linear, GELU, linear, GELU, skip connection (TVE, Figure 10 b).

    Args:
        width_in: number of channels of the input.
        width: number of channels of the output.
        tokens: number of tokens N, to let the second linear layer mix tokens, as the released code does; 0 to let it
            mix channels, as the paper says.
        activation: apply GELU after each linear layer.
        skip: add the input to the output; needs `width_in` = `width`.
    """

    def __init__(self, width_in: int, width: int, tokens: int = 0, activation: bool = True, skip: bool = True) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width_in), nn.Linear(width_in, width)
        self.second = nn.Linear(tokens or width, tokens or width)
        self.activation = nn.GELU() if activation else nn.Identity()
        self.tokens, self.skip = tokens, skip

    def forward(self, features: Tensor) -> Tensor:
        """Compute (B, N, width_in) → (B, N, width)."""
        hidden = self.activation(self.first(self.norm(features)))
        hidden = self.second(hidden.mT).mT if self.tokens else self.second(hidden)
        return self.activation(hidden) + features if self.skip else self.activation(hidden)


class PaperNetwork(nn.Module):
    """The paper's explainer: a masked autoencoder and a head of FFN layers for each of g and h (TVE, Appendix H).

    The first FFN layer has no skip connection, because the widths of its input and output differ. The last has no GELU.

    Args:
        target: the model to explain.
        grid: the patches of an image.
        mae: initial weights of the autoencoders: path of a checkpoint, or name of a timm model; `None` for random ones.
        width: width of the encoder, in channels.
        depth: number of blocks of the encoder.
        heads: number of attention heads of the encoder.
        decoder_width: width of the decoder, in channels.
        decoder_depth: number of blocks of the decoder.
        decoder_heads: number of attention heads of the decoder.
        head_layers: number of FFN layers of each head.
        token_mixing: use the head of the released code, see `ffn_layers`.
        shared_trunk: use one autoencoder for both g and h, at half the cost.
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
        check_range(2, head_layers=head_layers)
        self.width, self.depth, self.heads = width, depth, heads
        self.decoder_width, self.decoder_depth, self.decoder_heads = decoder_width, decoder_depth, decoder_heads
        self.head_layers, self.token_mixing, self.shared_trunk = head_layers, token_mixing, shared_trunk
        self.autoencoders = nn.ModuleList(
            MaskedAutoencoder(grid, width, depth, heads, decoder_width, decoder_depth, decoder_heads)
            for _ in range(1 if shared_trunk else 2)
        )
        if mae is not None:
            for autoencoder in self.autoencoders:
                autoencoder.load(mae)  # type: ignore[operator]
        tokens = grid.num_patches if token_mixing else 0
        self.ffns = nn.ModuleList(
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
        """Predict meta-attributions, see `MetaNetwork`; only `images` and `patches` are used."""
        normalised = (zero_to_one(images) - self.mean) / self.std
        tokens = [autoencoder(normalised) for autoencoder in self.autoencoders]
        return at_patches(torch.stack([self.ffns[0](tokens[0]), self.ffns[1](tokens[-1])], 2), patches)

    def calibrate(self, meta: Tensor, embedding: Tensor | None = None) -> None:
        """Do nothing, because the heads learn the scale of the meta-attributions."""


def ffn_layers(width_in: int, width: int, layers: int, tokens: int = 0) -> list[FFN]:
    """Build the FFN layers of a head.

    The first layer has no skip connection, and the last no GELU. With token mixing, as in the released code, the first
    also has no GELU, and the last no skip connection.

    Args:
        width_in: number of channels of the input.
        width: number of channels of the output.
        layers: number of layers, at least 2.
        tokens: number of tokens N for token mixing, see `FFN`; 0 for none.

    >>> [layer.skip for layer in ffn_layers(8, 4, layers=4)], [layer.skip for layer in ffn_layers(8, 4, 4, tokens=9)]
    ([False, True, True, True], [False, True, True, False])
    """
    first = FFN(width_in, width, tokens, activation=not tokens, skip=False)
    last = FFN(width, width, tokens, activation=False, skip=not tokens)
    return [first, *(FFN(width, width, tokens) for _ in range(layers - 2)), last]
