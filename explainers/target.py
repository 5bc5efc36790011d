"""The model to explain: a classifier head H on a backbone G (TVE, Section 2), both from timm."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import timm.data
import torch
from safetensors.torch import load_file, save_file
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from explainers.errors import InputError

_hashes: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of the names and values of a module's weights; computed again only after one of them has changed."""
    state = sorted(module.state_dict().items())
    versions = [(name, value.data_ptr(), value.dtype, value.shape, value._version) for name, value in state]
    known = _hashes.get(module)
    if known is not None and known[0] == versions:
        return known[1]
    digest = hashlib.sha256()
    for name, value in state:
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    _hashes[module] = versions, digest.hexdigest()
    return digest.hexdigest()


class DistilledHead(nn.Module):
    """DeiT's two linear heads, one on each half of the embedding; the logits are their mean."""

    def __init__(self, head: nn.Module, head_dist: nn.Module) -> None:
        super().__init__()
        self.head, self.head_dist = head, head_dist

    def forward(self, embeddings: Tensor) -> Tensor:
        class_token, distillation_token = embeddings.chunk(2, -1)
        return (self.head(class_token) + self.head_dist(distillation_token)) / 2


def load_head(path: str | Path) -> nn.Linear:
    """A linear head saved by `save_head`: `weight` (K, D) and `bias` (K,) in a safetensors file."""
    if not Path(path).is_file():
        raise InputError(f"no head at {path}: fit one first, with `python train.py experiment=linear_head`")
    weights = load_file(path)
    classes, width = weights["weight"].shape
    head = nn.Linear(width, classes)
    head.load_state_dict(weights)
    return head


def save_head(head: nn.Linear, path: str | Path) -> None:
    save_file({name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}, path)


class TargetModel(nn.Module):
    """f = H ∘ G with the input normalisation that its weights expect.

    Args:
        model: any timm classifier. Its classifier becomes `head` and the rest `backbone`.
        head: a head for another task on the same backbone, or the file that holds one; `None` keeps the model's own.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, head: nn.Module | str | Path | None = None) -> None:
        super().__init__()
        own = model.get_classifier()
        self.distilled = isinstance(model, VisionTransformerDistilled)
        self.embed_dim: int = model.head_hidden_size * (2 if self.distilled else 1)
        given = head if isinstance(head, str | Path) else "the head"
        if head is None:
            head = DistilledHead(*own) if self.distilled else own
        elif not isinstance(head, nn.Module):
            head = load_head(head)
        model.reset_classifier(0)
        self.backbone: Any = model  # timm has no type for what its models share
        self.head: Any = head
        self._check_head(given)
        config = timm.data.resolve_model_data_config(model)
        self.register_buffer("mean", torch.tensor(config["mean"])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(config["std"])[:, None, None], persistent=False)

    def _check_head(self, given: str | Path) -> None:
        width = getattr(self.head, "in_features", self.embed_dim)
        if width != self.embed_dim:
            raise InputError(
                f"expected a head for embeddings of width {self.embed_dim}, as {self.name} gives; {given} reads width"
                f" {width}: fit one for this backbone, with `python train.py experiment=linear_head`"
            )

    @property
    def num_classes(self) -> int:
        """K."""
        head: Any = self.head.head if isinstance(self.head, DistilledHead) else self.head
        return int(head.out_features)

    @property
    def name(self) -> str:
        """timm's name of the architecture."""
        return self.backbone.pretrained_cfg.get("architecture", type(self.backbone).__name__)

    def identity(self) -> dict[str, str]:
        """Which backbone this is: what was computed with it holds for no other."""
        return {"backbone": self.name, "backbone_sha256": weights_hash(self.backbone)}

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) → what the backbone was trained on."""
        return (images.float() / 255 - self.mean) / self.std

    def embed(self, normalised: Tensor) -> Tensor:
        """G: normalised images (B, C, H, W) → embeddings (B, D)."""
        return self._pool(self.backbone.forward_features(normalised))

    def embed_with_maps(self, normalised: Tensor, blocks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """The embeddings (B, D) and, from the same forward pass, the maps (B, N', C) of `blocks`, row by row."""
        tokens = isinstance(self.backbone, VisionTransformer)  # they need no copy, and other models have maps only
        features, maps = self.backbone.forward_intermediates(
            normalised, indices=list(blocks), output_fmt="NLC" if tokens else "NCHW"
        )
        return self._pool(features), maps if tokens else [feature_map.flatten(2).mT for feature_map in maps]

    def embed_with_patches(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings (B, D) and, after the same final normalisation, those of the patches (B, N', D), row by row.

        Raises:
            InputError: for models whose patches do not go the way of the whole image: a distilled DeiT, attention
                pooling, layers after the pooling.
        """
        features = self.backbone.forward_features(normalised)
        transformer = isinstance(self.backbone, VisionTransformer) and self.backbone.attn_pool is None
        embeddings = self._pool(features)
        if transformer and not self.distilled:
            return embeddings, self.backbone.fc_norm(features[:, self.backbone.num_prefix_tokens :])
        after_pooling = getattr(getattr(self.backbone, "head", None), "norm", nn.Identity())
        if features.dim() == 4 and isinstance(after_pooling, nn.Identity):
            if features.shape[-1] == self.embed_dim:  # Swin, channels last
                return embeddings, features.flatten(1, 2)
            if features.shape[1] == self.embed_dim:
                return embeddings, features.flatten(2).mT
        raise InputError(
            f"expected a model whose patches have embeddings like its images, got {self.name}: take a ViT with a class"
            " token or average pooling, a Swin or a ResNet"
        )

    def map_channels(self, blocks: Sequence[int]) -> list[int]:
        """The number of channels of each of the feature maps of `embed_with_maps`."""
        info = list(self.backbone.feature_info)
        if max(blocks) >= len(info):
            raise InputError(f"{self.name} has {len(info)} blocks; blocks {list(blocks)} were asked for")
        return [info[block]["num_chs"] for block in blocks]

    def classify(self, embeddings: Tensor) -> Tensor:
        """H: embeddings (..., D) → logits (..., K), in full precision: attributions are small differences of them."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.head(embeddings.float())

    def probabilities(self, normalised: Tensor) -> Tensor:
        """f: normalised images (B, C, H, W) → class probabilities (B, K)."""
        return self.classify(self.embed(normalised)).softmax(-1)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) → logits (B, K)."""
        return self.classify(self.embed(self.normalise(images)))

    def _pool(self, features: Tensor) -> Tensor:
        if self.distilled:  # timm would average the two tokens, and the heads differ
            return features[:, :2].flatten(1)
        return self.backbone.forward_head(features, pre_logits=True)
