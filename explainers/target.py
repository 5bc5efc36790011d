"""The model to explain: a classifier head H on a backbone G (TVE, Section 2), both from timm."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm.data
import torch
from safetensors.torch import load_file, save_file
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn


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
        raise FileNotFoundError(f"no head at {path}: fit one first, with `python train.py experiment=linear_head`")
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
        if head is None:
            head = DistilledHead(*own) if self.distilled else own
        elif not isinstance(head, nn.Module):
            head = load_head(head)
        model.reset_classifier(0)
        self.backbone: Any = model  # timm has no type for what its models share
        self.head: Any = head
        self._check_head()
        config = timm.data.resolve_model_data_config(model)
        self.register_buffer("mean", torch.tensor(config["mean"])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(config["std"])[:, None, None], persistent=False)

    def _check_head(self) -> None:
        width = getattr(self.head, "in_features", self.embed_dim)
        if width != self.embed_dim:
            raise ValueError(f"the head reads embeddings of width {width}, the backbone gives {self.embed_dim}")

    @property
    def name(self) -> str:
        """timm's name of the architecture."""
        return self.backbone.pretrained_cfg.get("architecture", type(self.backbone).__name__)

    def weights_hash(self) -> str:
        """SHA-256 of the backbone's weights: equal for equal backbones, whatever their heads."""
        digest = hashlib.sha256()
        for name, value in sorted(self.backbone.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) → what the backbone was trained on."""
        return (images.float() / 255 - self.mean) / self.std

    def embed(self, normalised: Tensor) -> Tensor:
        """G: normalised images (B, C, H, W) → embeddings (B, D)."""
        return self._pool(self.backbone.forward_features(normalised))

    def embed_with_maps(self, normalised: Tensor, blocks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """The embeddings (B, D) and, from the same forward pass, the feature maps (B, C, P', P') of `blocks`."""
        features, maps = self.backbone.forward_intermediates(normalised, indices=list(blocks), output_fmt="NCHW")
        return self._pool(features), maps

    def map_channels(self, blocks: Sequence[int]) -> list[int]:
        """The number of channels of each of the feature maps of `embed_with_maps`."""
        info = list(self.backbone.feature_info)
        if max(blocks) >= len(info):
            raise ValueError(f"{self.name} has {len(info)} blocks; blocks {list(blocks)} were asked for")
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
