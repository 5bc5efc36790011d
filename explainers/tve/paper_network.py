"""The network of the TVE paper: masked autoencoders, each followed by a head of FFN layers (Appendix H)."""

import warnings

import timm
import torch
from torch import Tensor, nn

from explainers.errors import check_range
from explainers.learned.trunk import at_patches
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.inputs import zero_to_one
from explainers.saved.files import is_first_process
from explainers.tve.masked_autoencoder import DECODER, ENCODER, MaskedAutoencoder, Transformer, read_mae


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
        self.norm = nn.LayerNorm(width_in)
        self.first = nn.Linear(width_in, width)
        self.second = nn.Linear(tokens or width, tokens or width)
        self.activation = nn.GELU() if activation else nn.Identity()
        self.tokens = tokens
        self.skip = skip

    def forward(self, features: Tensor) -> Tensor:
        """Compute (B, N, width_in) → (B, N, width)."""
        hidden = self.activation(self.first(self.norm(features)))
        hidden = self.second(hidden.mT).mT if self.tokens else self.second(hidden)
        return self.activation(hidden) + features if self.skip else self.activation(hidden)


class PaperNetwork(nn.Module):
    """The paper's explainer: a masked autoencoder and a head of FFN layers for each of g and h (TVE, Appendix H).

    The paper's autoencoder has an output of 768 channels. We read them as the 16 × 16 × 3 pixels that it reconstructs
    of each patch, because its decoder is 512 wide, in the published weights too. The released code reads the decoder.

    Args:
        target: the model to explain.
        grid: the patches of an image.
        mae: initial weights of the autoencoders, see `read_mae`; the paper has hf://facebook/vit-mae-base. `None` for
            random ones.
        encoder: size of the encoders.
        decoder: size of the decoders.
        reconstruct: read the pixels that the autoencoder reconstructs; otherwise the tokens of the decoder.
        head_layers: number of FFN layers of each head.
        token_mixing: use the head of the released code, see `ffn_layers`.
        shared_trunk: use one autoencoder for both g and h, at half the cost.
    """

    blocks: tuple[int, ...] = ()
    initial = ("mae",)  # arguments that choose initial weights
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        mae: str | None = None,
        encoder: Transformer = ENCODER,
        decoder: Transformer = DECODER,
        reconstruct: bool = True,
        head_layers: int = 17,
        token_mixing: bool = False,
        shared_trunk: bool = False,
    ) -> None:
        super().__init__()
        check_range(2, head_layers=head_layers)
        self.mae = mae
        self.encoder = dict(encoder)
        self.decoder = dict(decoder)
        self.reconstruct = reconstruct
        self.head_layers = head_layers
        self.token_mixing = token_mixing
        self.shared_trunk = shared_trunk
        self.autoencoders = nn.ModuleList(
            MaskedAutoencoder(grid, encoder, decoder, reconstruct) for _ in range(1 if shared_trunk else 2)
        )
        if mae is not None:
            self._load(mae)
        tokens = grid.num_patches if token_mixing else 0
        width_out: int = self.autoencoders[0].width_out  # type: ignore[assignment]
        self.ffns = nn.ModuleList(
            nn.Sequential(*ffn_layers(width_out, target.embed_dim, head_layers, tokens)) for _ in range(2)
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
        """Predict meta-attributions, see `LightNetwork.forward`; only `images` and `patches` are used."""
        normalised = (zero_to_one(images) - self.mean) / self.std
        tokens = [autoencoder(normalised) for autoencoder in self.autoencoders]
        return at_patches(torch.stack([self.ffns[0](tokens[0]), self.ffns[1](tokens[-1])], 2), patches)

    def initialise(self, meta: Tensor, embedding: Tensor | None = None) -> None:
        """Warn that a training starts from random weights; the heads learn the scale of the meta-attributions."""
        if self.mae is None and is_first_process():
            warnings.warn(
                "the autoencoders start from random weights, those of the paper from mae=hf://facebook/vit-mae-base or"
                " a file of them",
                stacklevel=2,
            )

    def _load(self, mae: str) -> None:
        weights = read_mae(mae)
        for autoencoder in self.autoencoders:
            missing = autoencoder.load(weights, mae)  # type: ignore[operator]
        if missing and is_first_process():
            lacking = f"{mae} lacks {len(missing)} tensors, {missing[0]} to {missing[-1]}: they start random"
            warnings.warn(lacking, stacklevel=2)


def ffn_layers(width_in: int, width: int, layers: int, tokens: int = 0) -> list[FFN]:
    """Build the FFN layers of a head.

    The first layer has no skip connection, because its widths differ, and the last no GELU. With token mixing, as in
    the released code, the first also has no GELU, and the last no skip connection.

    Args:
        width_in: number of channels of the input.
        width: number of channels of the output.
        layers: number of layers, at least 2.
        tokens: see `FFN`.

    >>> [layer.skip for layer in ffn_layers(8, 4, layers=4)], [layer.skip for layer in ffn_layers(8, 4, 4, tokens=9)]
    ([False, True, True, True], [False, True, True, False])
    """
    first = FFN(width_in, width, tokens, activation=not tokens, skip=False)
    last = FFN(width, width, tokens, activation=False, skip=not tokens)
    return [first, *(FFN(width, width, tokens) for _ in range(layers - 2)), last]
