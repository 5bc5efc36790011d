"""Reads weights of masked autoencoders: official files, Hugging Face's, and encoders of timm."""

import pickle
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from explainers.errors import InputError
from explainers.saved.weights import check_finite
from explainers.share.pretrained import HUB

PUBLISHED = "facebook/vit-mae-"
"""Beginning of the names of the published weights on the Hugging Face Hub, which need no `hf://`."""

FILES = ("model.safetensors", "pytorch_model.bin")
"""Files of a repository that may hold the weights; the first one that exists is fetched."""

RENAMED = (
    (r"^vit\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.", "blocks."),
    (r"^layernorm\.", "norm."),
    (r"^decoder\.decoder_layers\.", "decoder_blocks."),
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
        source: path of an official file (.pth) or of one of Hugging Face's (.bin, .safetensors); `facebook/vit-mae-...`
            or `hf://user/name`, a repository of the Hugging Face Hub; or the name of a timm model, an encoder alone.

    Raises:
        InputError: if there is no such file, repository or model, or a file is damaged, of another kind or not finite.
    """
    if Path(source).is_file() or source.startswith((HUB, PUBLISHED)):
        path = Path(source) if Path(source).is_file() else _downloaded(source)
        weights = _read_file(path)
        check_finite(weights, path)
        return official_names(weights)
    if timm.is_model(source.partition(".")[0]):
        return timm.create_model(source, pretrained=True, num_classes=0).state_dict()
    raise InputError(
        f"expected weights of a masked autoencoder in a file, on the Hugging Face Hub (hf://facebook/vit-mae-base), or"
        f" of a timm model, got mae={source}, which is none of them: correct the path"
    )


def official_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of Hugging Face's ViTMAEForPreTraining; other weights stay as they are.

    Queries, keys and values, which are three layers there, become one layer.

    >>> parts = {f"vit.encoder.layer.0.attention.attention.{part}.bias": torch.ones(1) for part in ("query", "key")}
    >>> value = {"vit.encoder.layer.0.attention.attention.value.bias": torch.zeros(1)}
    >>> official_names(parts | value)
    {'blocks.0.attn.qkv.bias': tensor([1., 1., 0.])}
    """
    if not any(".attention.attention.query." in name for name in weights):
        return weights
    named = {}
    for name, value in weights.items():
        for pattern, official in RENAMED:
            name = re.sub(pattern, official, name)
        named[name] = value
    for name in [name for name in named if ".attn.query." in name]:
        parts = [named.pop(name.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
        named[name.replace(".query.", ".qkv.")] = torch.cat(parts)
    return named


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
        raise InputError(
            f"expected weights of a masked autoencoder in {path}, got a file that cannot be read as tensors ({reason}):"
            " download it again, or give another file"
        ) from error


def _downloaded(source: str) -> Path:
    """The local copy of the weights of a repository, which are downloaded once."""
    repository = source.removeprefix(HUB)
    reason = f"it holds none of {', '.join(FILES)}"
    for name in FILES:
        try:
            return Path(hf_hub_download(repository, name))
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):
                reason = "it cannot be reached, and there is no earlier download"
                break
        except (OSError, ValueError) as error:  # no repository, no permission, no such name
            reason = str(error).strip().partition("\n")[0]
            break
    raise InputError(
        f"expected weights of a masked autoencoder at {source}, got none from the Hugging Face Hub ({reason}): download"
        f" {FILES[0]} elsewhere and set explainer.network.mae to its path, or to null to start from random weights"
    )
