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
    """Compute the SHA-256 of the names and values of a module's weights.

    The hash is cached, and computed again only after PyTorch's version counter of one of the weights has changed.

    >>> layer, same = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> _ = same.load_state_dict(layer.state_dict())
    >>> weights_hash(layer) == weights_hash(same)
    True
    >>> _ = nn.init.zeros_(same.bias)
    >>> weights_hash(layer) == weights_hash(same)
    False
    """
    state = sorted(module.state_dict().items())
    versions = [(name, value.data_ptr(), value.dtype, value.shape, value._version) for name, value in state]
    cached = _hashes.get(module)
    if cached is not None and cached[0] == versions:
        return cached[1]
    digest = hashlib.sha256()
    for name, value in state:
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    _hashes[module] = versions, digest.hexdigest()
    return digest.hexdigest()


class DistilledHead(nn.Module):
    """DeiT's two linear heads, one on each half of the embedding; the logits are the mean of the two.

    Args:
        head: head on the class token, the first half of the embedding.
        head_dist: head on the distillation token, the second half.

    >>> DistilledHead(nn.Identity(), nn.Identity())(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist()
    [[2.0, 3.0]]
    """

    def __init__(self, head: nn.Module, head_dist: nn.Module) -> None:
        super().__init__()
        self.head, self.head_dist = head, head_dist

    def forward(self, embeddings: Tensor) -> Tensor:
        """Classify embeddings (..., 2·width) → logits (..., K)."""
        class_token, distillation_token = embeddings.chunk(2, -1)
        return (self.head(class_token) + self.head_dist(distillation_token)) / 2


def load_head(path: str | Path) -> nn.Linear:
    """Load a linear head that `save_head` wrote: a safetensors file of `weight` (K, D) and `bias` (K,)."""
    if not Path(path).is_file():
        raise InputError(f"no head at {path}: fit one first, with `python train.py experiment=linear_head`")
    weights = load_file(path)
    classes, width = weights["weight"].shape
    head = nn.Linear(width, classes)
    head.load_state_dict(weights)
    return head


def save_head(head: nn.Linear, path: str | Path) -> None:
    """Write a linear head to a safetensors file."""
    save_file({name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}, path)


class TargetModel(nn.Module):
    """A classifier f = H ∘ G, with the input normalisation that its weights expect.

    Args:
        model: any timm classifier. Its classification layer becomes `head`, and the rest `backbone`.
        head: a head for another task on the same backbone, or the path of one; `None` keeps the model's own head.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, head: nn.Module | str | Path | None = None) -> None:
        super().__init__()
        own_head = model.get_classifier()
        self.distilled = isinstance(model, VisionTransformerDistilled)
        self.embed_dim: int = model.head_hidden_size * (2 if self.distilled else 1)
        head_name = head if isinstance(head, str | Path) else "the head"
        if head is None:
            head = DistilledHead(*own_head) if self.distilled else own_head
        elif not isinstance(head, nn.Module):
            head = load_head(head)
        model.reset_classifier(0)
        # Convolutions are faster in this format. Any: timm has no type for the methods that all its models share
        self.backbone: Any = model.to(memory_format=torch.channels_last)
        self.head: Any = head
        self._check_head(head_name)
        config = timm.data.resolve_model_data_config(model)
        self.register_buffer("mean", torch.tensor(config["mean"])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(config["std"])[:, None, None], persistent=False)

    def _check_head(self, head_name: str | Path) -> None:
        width = getattr(self.head, "in_features", self.embed_dim)
        if width != self.embed_dim:
            raise InputError(
                f"expected a head for embeddings of width {self.embed_dim}, as {self.name} gives; {head_name} reads"
                f" width {width}: fit one for this backbone, with `python train.py experiment=linear_head`"
            )

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        head: Any = self.head.head if isinstance(self.head, DistilledHead) else self.head
        return int(head.out_features)

    @property
    def name(self) -> str:
        """Name of the architecture in timm."""
        return self.backbone.pretrained_cfg.get("architecture", type(self.backbone).__name__)

    def identity(self) -> dict[str, str]:
        """Return the name and hash of the backbone; values computed with one backbone are invalid for any other."""
        return {"backbone": self.name, "backbone_sha256": weights_hash(self.backbone)}

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise uint8 images (B, C, H, W) with the mean and std that the backbone was trained with: float32."""
        return (images.float() / 255 - self.mean) / self.std

    def embed(self, normalised: Tensor) -> Tensor:
        """Compute G: normalised images (B, C, H, W) → embeddings (B, D)."""
        return self.pool(self.backbone.forward_features(normalised))

    def embed_with_maps(self, normalised: Tensor, blocks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Compute the embeddings and the feature maps of some blocks, in one forward pass.

        Args:
            normalised: images, (B, C, H, W).
            blocks: indices of the transformer blocks, or of the stages of Swin and ResNet, in ascending order.

        Returns:
            The embeddings (B, D), and a feature map (B, N', C) for each block; its N' positions are row by row.
        """
        tokens = isinstance(self.backbone, VisionTransformer)  # NLC avoids a copy; other models support only NCHW
        features, maps = self.backbone.forward_intermediates(
            normalised, indices=list(blocks), output_fmt="NLC" if tokens else "NCHW"
        )
        return self.pool(features), maps if tokens else [feature_map.flatten(2).mT for feature_map in maps]

    def embed_with_patches(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the embeddings of the images, and of their patches after the same final normalisation.

        Args:
            normalised: images, (B, C, H, W).

        Returns:
            The embeddings of the images (B, D) and of the patches (B, N', D), row by row.

        Raises:
            InputError: for models that compute embeddings of images by layers that do not apply to patches: a distilled
                DeiT, attention pooling, layers after the pooling.
        """
        features = self.backbone.forward_features(normalised)
        is_vit = isinstance(self.backbone, VisionTransformer) and self.backbone.attn_pool is None
        embeddings = self.pool(features)
        if is_vit and not self.distilled:
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
        """Return the number of channels of each feature map that `embed_with_maps` returns for `blocks`."""
        info = list(self.backbone.feature_info)
        if list(blocks) != sorted(set(blocks)) or not all(0 <= block < len(info) for block in blocks):
            raise InputError(
                f"{self.name} has {len(info)} blocks; blocks {list(blocks)} were asked for: give some of 0 to "
                f"{len(info) - 1} in ascending order"
            )
        return [info[block]["num_chs"] for block in blocks]

    def classify(self, embeddings: Tensor) -> Tensor:
        """Compute H: embeddings (..., D) → logits (..., K).

        Computed in float32 even under autocast, because attributions are small differences of logits.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.head(embeddings.float())

    def probabilities(self, normalised: Tensor) -> Tensor:
        """Compute f: normalised images (B, C, H, W) → class probabilities (B, K)."""
        return self.classify(self.embed(normalised)).softmax(-1)

    def forward(self, images: Tensor) -> Tensor:
        """Classify uint8 images (B, C, H, W) → logits (B, K)."""
        return self.classify(self.embed(self.normalise(images)))

    def pool(self, features: Tensor) -> Tensor:
        """Reduce the output of the last layer, (B, T, D) or a feature map, to embeddings (B, D)."""
        if self.distilled:  # timm would average the two tokens, but each has its own head
            return features[:, :2].flatten(1)
        return self.backbone.forward_head(features, pre_logits=True)
