"""The masked autoencoder (He et al., 2022) in the network of the TVE paper."""

import pickle
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from explainers.errors import InputError, check_positive
from explainers.masking import PatchGrid
from explainers.models.mapping import join_weights, rename_weights
from explainers.saved.weights import check_finite
from explainers.share.pretrained import HUB

FILES = ("model.safetensors", "pytorch_model.bin")
"""Files of a repository that may hold the weights; the first one that exists is fetched."""

RENAMED = (
    (r"^vit\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.", "blocks."),
    (r"^layernorm\.", "norm."),
    (r"^decoder\.decoder_(layers|encoder\.layer)\.", "decoder_blocks."),  # of before transformers 5, and of it
    (r"^decoder\.", ""),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
)
"""Patterns in the names of Hugging Face's ViTMAEForPreTraining → the official names, applied in this order."""


def read_mae(source: str) -> dict[str, Tensor]:
    """Read weights of a masked autoencoder, under the names of the official files (facebookresearch/mae).

    Args:
        source: path of an official file (.pth) or of one of Hugging Face's (.bin, .safetensors), or `hf://user/name`, a
            repository of the Hugging Face Hub.

    Raises:
        InputError: if there is no such file or repository, or a file is damaged, of another kind or not finite.
    """
    if not Path(source).is_file() and not source.startswith(HUB):
        raise InputError(
            f"expected weights of a masked autoencoder in a file, or on the Hugging Face Hub (hf://facebook/vit-mae-base"
            f"), got mae={source}, which is neither: correct the path"
        )
    path = Path(source) if Path(source).is_file() else _download(source)
    weights = _read_file(path)
    check_finite(weights, path)
    return official_names(weights)


def official_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of Hugging Face's ViTMAEForPreTraining, and join queries, keys and values; others stay.

    >>> parts = {f"vit.encoder.layer.0.attention.attention.{part}.bias": torch.ones(1) for part in ("query", "key")}
    >>> value = {"vit.encoder.layer.0.attention.attention.value.bias": torch.zeros(1)}
    >>> official_names(parts | value)
    {'blocks.0.attn.qkv.bias': tensor([1., 1., 0.])}
    """
    if not any(".attention.attention.query." in name for name in weights):
        return weights
    return join_weights(rename_weights(weights, RENAMED), ("attn.query", "attn.key", "attn.value"), "attn.qkv")


def _read_file(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file as data: a pickled program in it is refused."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([Namespace]):  # the arguments of a training by the official code
            saved: Any = torch.load(path, map_location="cpu", weights_only=True)
        saved = saved.get("model", saved)
        return {str(name): value for name, value in saved.items() if isinstance(value, Tensor)}
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
        reason = " ".join(str(error).split())[:100]
        message = f"expected weights of a masked autoencoder in {path}, got a file that cannot be read as tensors"
        raise InputError(f"{message} ({reason}): download it again, or give another file") from error


def _download(source: str) -> Path:
    """The local copy of the weights of a repository, which are downloaded once."""
    reason = ""
    for name in FILES:
        try:
            return Path(hf_hub_download(source.removeprefix(HUB), name))
        except (EntryNotFoundError, OSError, ValueError) as error:  # no file, repository, permission or network
            reason = str(error).strip().partition("\n")[0]
    raise InputError(
        f"expected weights of a masked autoencoder at {source}, got none from the Hugging Face Hub ({reason}): download"
        f" {FILES[0]} elsewhere and give its path, or start from random weights with mae=None",
        "mae",
    )


NORM: Any = partial(nn.LayerNorm, eps=1e-6)  # as in the official masked autoencoder


class Transformer(TypedDict):
    """Size of a transformer: channels, blocks, and attention heads of a block."""

    width: int
    depth: int
    heads: int


ENCODER: Transformer = {"width": 768, "depth": 12, "heads": 12}
DECODER: Transformer = {"width": 512, "depth": 8, "heads": 16}
"""Sizes of the base model of He et al., which the TVE paper has."""


class MaskedAutoencoder(nn.Module):
    """Encoder and decoder of a masked autoencoder (He et al., 2022), applied to the whole image without masking.

    Attributes are named as in the official checkpoints, so that weights can be loaded by name. For the arguments see
    `PaperNetwork`.
    """

    def __init__(
        self,
        grid: PatchGrid,
        encoder: Transformer = ENCODER,
        decoder: Transformer = DECODER,
        reconstruct: bool = True,
    ) -> None:
        super().__init__()
        for part, size in (("encoder", encoder), ("decoder", decoder)):
            check_positive(**{f"{part}.depth": size["depth"]})
            channels, heads = size["width"], size["heads"]
            if min(channels, heads) <= 0 or channels % 4 or channels % heads:
                raise InputError(
                    f"expected {part}.width as a multiple of 4 and of {heads} heads, got {part}.width={channels}"
                )
        width, decoder_width = encoder["width"], decoder["width"]
        depth, heads = encoder["depth"], encoder["heads"]
        self.encoder = VisionTransformer(
            grid.image_size, grid.patch_size, num_classes=0, embed_dim=width, depth=depth, num_heads=heads
        )
        self.encoder.pos_embed = nn.Parameter(sincos_positions(grid, width))
        self.decoder_embed = nn.Linear(width, decoder_width)
        self.decoder_pos_embed = nn.Parameter(sincos_positions(grid, decoder_width), requires_grad=False)
        self.decoder_blocks = nn.Sequential(
            *(Block(decoder_width, decoder["heads"], qkv_bias=True, norm_layer=NORM) for _ in range(decoder["depth"]))
        )
        self.decoder_norm = NORM(decoder_width)
        pixels = 3 * grid.patch_size**2
        self.decoder_pred = nn.Linear(decoder_width, pixels) if reconstruct else nn.Identity()
        self.width_out = pixels if reconstruct else decoder_width

    def forward(self, images: Tensor) -> Tensor:
        """Compute normalised images (B, C, H, W) → patch tokens (B, N, width_out), without the class token."""
        tokens = self.decoder_embed(self.encoder.forward_features(images)) + self.decoder_pos_embed
        return self.decoder_pred(self.decoder_norm(self.decoder_blocks(tokens)))[:, 1:]

    def load(self, weights: Mapping[str, Tensor], source: str) -> list[str]:
        """Load weights of `read_mae`, at least of the encoder; return the names of the tensors that they do not have.

        Raises:
            InputError: for weights of another size, or of another architecture, with `source`.
        """
        shapes = {name: value.shape for name, value in self.state_dict().items()}
        # No patch is masked, and without the layer that reconstructs pixels its weights are not needed
        unused = {"mask_token", "decoder_pred.weight", "decoder_pred.bias"} - shapes.keys()
        renamed = {
            name if name.startswith("decoder_") else f"encoder.{name}": value
            for name, value in weights.items()
            if name not in unused
        }
        for name, value in renamed.items():
            if shapes.get(name) != value.shape:
                expected = list(shapes[name]) if name in shapes else "missing"
                raise InputError(
                    f"{source} is not a masked autoencoder of this size: its {name} is {list(value.shape)}, this one's"
                    f" is {expected}: take a network of its size, or mae=None",
                    "mae",
                )
        missing, _ = self.load_state_dict(renamed, strict=False)
        return missing


def sincos_positions(grid: PatchGrid, width: int) -> Tensor:
    """Compute the fixed sine-cosine position embeddings of MAE, (1, 1 + N, width), for a width that is a multiple of 4.

    The first half of the channels encodes the column, and the second half the row. The class token has position 0.
    Below, it is followed by the patch of row 0 and column 0:

    >>> sincos_positions(PatchGrid(image_size=2, patch_size=1), width=4)[0, :2].tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]]
    """
    patches = build_sincos2d_pos_embed(list(grid.shape), width, interleave_sin_cos=True).roll(width // 2, -1)
    return torch.cat([torch.zeros(1, width), patches])[None]
