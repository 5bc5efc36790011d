"""The model to explain: a classifier head H on a backbone G (TVE, Section 2), both from timm."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm.data
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from explainers.errors import InputError, UnsupportedModel, checks_choices
from explainers.images.bands import PixelFormat
from explainers.images.transform import ImageTransform
from explainers.masking import PatchGrid, find_patch_size
from explainers.models.heads import (
    DistilledHead,
    NoHead,
    TextProjection,
    check_head_gives_logits,
    has_single_logit,
    load_head,
    split_single_logit,
    take_head,
)
from explainers.models.inputs import zero_to_one
from explainers.models.probes import Origin, find_statistics
from explainers.models.scores import Score, scale_logits
from explainers.models.wrappers import copy_attributes, copy_module
from explainers.saved.identity import Identity, architecture_hash, weights_hash
from explainers.saved.weights import check_finite, check_identity

LIMITS = ("_min", "_max")
"""Ends of the names of clipping limits of Gemma 4, which are infinite in layers that do not clip."""


class TargetModel(nn.Module):
    """A classifier f = H ∘ G, with the input normalisation that its weights expect.

    The constructor copies the model and the head. The caller's originals keep their heads, and later changes of either
    copy, such as training or a move to another device, do not affect the other. Both copies take memory.

    Args:
        model: any timm classifier. Its classification layer becomes `head`, and the rest becomes `backbone`. Or a
            `TargetModel`, to give it another head.
        head: a head for another task on the same backbone, or the path of its file; `None` keeps the model's own head.
            A model without a head, such as DINOv2, only embeds.
        score: what the logits mean: `softmax` for one class of several, `sigmoid` for several classes at once, `value`
            for numbers, as of a regression. A linear head of a single logit is converted to two classes, see
            `heads.split_single_logit`, unless it is a `value`. `None`: `softmax`.

    Raises:
        InputError: if no head is given and the model has several, if a single logit has no `score`, if `head` expects
            embeddings of another width, if its file names another backbone, or if weights are not finite.
    """

    mean: Tensor
    std: Tensor
    origin: Origin | None = None
    """What was taken apart, until it is compared on the first photo."""

    @checks_choices
    def __init__(self, model: Any, head: nn.Module | str | Path | None = None, score: Score | None = None) -> None:
        super().__init__()
        names: list[str] = []
        given = model
        if isinstance(model, TargetModel):
            names, score = (model.classes, score or model.score) if head is None else ([], score)
            model, head = model.backbone, model.head if head is None else head
        if not hasattr(model, "reset_classifier"):
            raise InputError(
                f"expected a classifier of timm, got {type(model).__name__}: convert a model of another library with"
                " explainers.models.as_target(model)"
            )
        memo: dict[int, Any] = {}
        model, head = (copy_module(each, memo) if isinstance(each, nn.Module) else each for each in (model, head))
        self.distilled = isinstance(model, VisionTransformerDistilled)
        self.embed_dim: int = model.head_hidden_size * (2 if self.distilled else 1)
        path = head if isinstance(head, str | Path) else "the head"
        fitted: Identity = {}
        if head is None:
            head = take_head(model)
        elif not isinstance(head, nn.Module):
            head, fitted = load_head(head)
        model.reset_classifier(0)
        if not hasattr(model, "pretrained_cfg"):  # built by its class
            model.pretrained_cfg = {"architecture": type(model).__name__}
        # Convolutions are faster in this format, which LambdaNets, with weights of five dimensions, lack. The type is
        # Any because timm has none for what its models share
        flat = all(weight.dim() <= 4 for weight in model.parameters())
        self.backbone: Any = model.to(memory_format=torch.channels_last) if flat else model
        self.head: Any = head
        self.score: Score = score or "softmax"
        if has_single_logit(head) and score != "value":
            if score is None and not fitted:
                raise InputError(
                    f"score= is needed for the single logit of {type(model).__name__}: sigmoid if it is that of a class"
                    " (1, against 0), value if it is the number of a regression"
                )
            self.head, self.score = split_single_logit(head), "softmax"
        self.classes: list[str] = names or list(fitted.get("classes", getattr(self.head, "class_names", ())))
        """Names of the classes, in the order of the logits; empty if they are not known."""
        mean, std = find_statistics(model)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32)[:, None, None], persistent=False)
        self.pixels = given.pixels if isinstance(given, TargetModel) else PixelFormat(self.channels)
        """The values of images, and the bands that pictures show."""
        self._check_head(path, fitted.get("target", {}))
        # Quantised weights cannot be tested, and those on the device "meta" have no values
        tested = {k: each for k, each in self.state_dict().items() if type(each) is Tensor and not k.endswith(LIMITS)}
        check_finite({k: each for k, each in tested.items() if not each.is_meta}, self.name)

    def _check_head(self, path: str | Path, fitted: Identity) -> None:
        """Raise an InputError for a head of another width, or that was fitted on another backbone than this one."""
        width = getattr(self.head, "in_features", self.embed_dim)
        if width != self.embed_dim:
            raise InputError(
                f"expected a head for embeddings of width {self.embed_dim}, as {self.name} gives, but {path} takes"
                f" width {width}: fit one for this backbone, with `python train.py experiment=linear_head`"
            )
        several = not hasattr(self.head, "out_features") and not isinstance(self.head, DistilledHead | NoHead)
        if several and not self.mean.is_meta:
            check_head_gives_logits(self.head, self.embed_dim)
        if fitted:
            check_identity(fitted, self.backbone_identity(), path)

    def in_eval_mode(self) -> "TargetModel":
        """This model if it is in evaluation mode, with weights that autograd accepts; otherwise such a copy."""
        training = any(part.training for part in self.modules())
        refused = any(weight.is_inference() for weight in self.parameters())
        return self.copied().eval() if training or refused else self

    def frozen(self) -> "TargetModel":
        """This model `in_eval_mode` if its weights need no gradients, otherwise a copy whose weights need none."""
        ready = self.in_eval_mode()
        if not any(weight.requires_grad for weight in ready.parameters()):
            return ready
        return (self.copied() if ready is self else ready).requires_grad_(False)

    def copied(self) -> "TargetModel":
        """A copy, also of a model that was made inside `torch.inference_mode`, whose weights autograd refuses."""
        return copy_attributes(self, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "TargetModel":
        return copy_attributes(self, memo)  # type: ignore[no-any-return]

    @property
    def patch_size(self) -> int | None:
        """Side of the model's own patches in pixels; `None` if its maps have several sizes, as in CNNs and Swin."""
        sizes = {level.get("reduction") for level in getattr(self.backbone, "feature_info", [])} - {None}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def grid(self) -> PatchGrid:
        """The grid that follows from the model.

        A model without patches of its own, such as a CNN or a Swin, whose maps have several sizes, has those of
        `find_patch_size`. If none divide its images, as those of 331 pixels, it takes smaller ones; a warning says so.

        Raises:
            InputError: if the images do not consist of the model's patches, or these are not square.

        >>> import timm
        >>> TargetModel(timm.create_model("test_vit")).grid, TargetModel(timm.create_model("test_resnet")).grid.shape
        (PatchGrid(image_size=160, patch_size=16, differs=False), (10, 10))
        """
        embed, config = getattr(self.backbone, "patch_embed", None), timm.data.resolve_model_data_config(self.backbone)
        height, width = getattr(embed, "img_size", None) or config["input_size"][1:]
        own = getattr(embed, "patch_size", None)
        if self.patch_size and isinstance(own, tuple) and own[0] != own[1]:
            raise InputError(f"expected a model of square patches, got {self.name} with {own[0]} × {own[1]} pixels")
        usual: int = getattr(self.backbone, "default_patch_size", 16)
        patch = self.patch_size or find_patch_size((height, width), usual)
        covered = height - height % patch, width - width % patch
        if covered != (height, width):
            if not (self.patch_size or getattr(embed, "strict_img_size", False)):
                said = f"no patches divide images of {height} × {width} pixels: they become {covered[0]} × {covered[1]}"
                warnings.warn(f"{self.name}: {said}", stacklevel=2)
                return PatchGrid(covered, patch)
            wanted = f"a model whose images consist of patches of {patch} pixels, got images of {height} × {width}"
            raise InputError(f"expected {wanted}: take image_size={covered}", "image_size")
        return PatchGrid(covered, patch)

    @property
    def transform(self) -> ImageTransform:
        """How photos become the images that the model was trained to see."""
        own: ImageTransform | None = self.backbone.pretrained_cfg.get("transform")  # of another library than timm
        size, fill = self.grid.size, tuple(round(255 * value) for value in self.mean.flatten().tolist())
        own = own or ImageTransform.from_timm(timm.data.resolve_model_data_config(self.backbone), size)
        return replace(own, size=size, fill=fill)

    def check_grid(self, grid: PatchGrid) -> None:
        """Raise an InputError unless a grid has the image and patch size of this model, or allows others by `differs`.

        CNNs and Swin have feature maps of several sizes, so they accept patches of any size.
        """
        embed, (height, width) = getattr(self.backbone, "patch_embed", None), grid.size
        strict = getattr(embed, "strict_img_size", False) and getattr(embed, "img_size", None)
        if strict and (own := PatchGrid(strict, 1)).size != grid.size:
            raise InputError(
                f"expected a grid of images of {own.size[0]} × {own.size[1]} pixels, as {self.name} takes, got"
                f" {height} × {width}: set grid.image_size={own.image_size}, or image_size={grid.image_size}",
                "grid.image_size",
                "image_size",
            )
        if self.patch_size not in (None, grid.patch_size) and not grid.differs:
            raise InputError(
                f"expected a grid of patches of {self.patch_size} pixels, as {self.name} has, got {grid.patch_size}:"
                f" set grid.patch_size={self.patch_size}, or grid.differs=True to allow another",
                "grid.patch_size",
                "grid.differs",
            )

    @property
    def channels(self) -> int:
        """C, the number of channels of an image."""
        return len(self.mean)

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        if isinstance(self.head, TextProjection):
            raise InputError(f"{self.name} embeds images for texts and has no classes: give text=, or compare images")
        head: Any = self.head.head if isinstance(self.head, DistilledHead) else self.head
        if hasattr(head, "out_features"):
            return int(head.out_features)
        with torch.no_grad():  # a head of several layers
            return self.classify(self.mean.new_zeros(1, self.embed_dim)).shape[-1]

    @property
    def name(self) -> str:
        """Name of the architecture in timm."""
        return self.backbone.pretrained_cfg.get("architecture", type(self.backbone).__name__)

    @property
    def timm_name(self) -> str:
        """Name of the architecture in timm, with the tag of its weights where it has one."""
        tag = self.backbone.pretrained_cfg.get("tag")
        return f"{self.name}.{tag}" if tag else self.name

    def backbone_identity(self) -> Identity:
        """Describe G: the architecture, its settings and weights, and the normalisation of its input."""
        mean, std = ([round(value, 6) for value in part.flatten().tolist()] for part in (self.mean, self.std))
        return {
            "backbone": self.name,
            "embed_dim": self.embed_dim,
            "normalisation": {"mean": mean, "std": std},
            "architecture_sha256": architecture_hash(self.backbone),
            "backbone_sha256": weights_hash(self.backbone),
        }

    def head_identity(self) -> Identity:
        """Describe H: its number of classes, architecture and weights, and its score."""
        return {
            "num_classes": self.num_classes,
            "head_architecture_sha256": architecture_hash(self.head),
            "head_sha256": weights_hash(self.head),
            **({} if self.score == "softmax" else {"score": self.score}),
        }

    def identity(self) -> Identity:
        """Describe f = H ∘ G: the backbone and the head."""
        return self.backbone_identity() | self.head_identity()

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images (B, C, H, W), uint8 or uint16, with mean and std of the backbone's training: float32."""
        normalised = (zero_to_one(images) - self.mean) / self.std
        if self.origin is not None:
            self.origin.compare(self, normalised)
        return normalised

    def embed(self, normalised: Tensor) -> Tensor:
        """Compute G: normalised images (B, C, H, W) → embeddings (B, D)."""
        return self.pool(self.backbone.forward_features(normalised))

    def embed_with_maps(self, normalised: Tensor, blocks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Compute the embeddings and the feature maps of some blocks, in one forward pass.

        Args:
            normalised: images, (B, C, H, W).
            blocks: indices of the transformer blocks, or of the stages of Swin and ResNet, in ascending order.

        Returns:
            The embeddings (B, D), and for each block a feature map (B, N', C) of N' positions, row by row.
        """
        features, maps = self.read_maps(normalised, blocks)
        return self.pool(features), maps

    def read_maps(self, normalised: Tensor, blocks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Compute what `pool` takes, and the feature maps of `embed_with_maps`."""
        tokens = isinstance(self.backbone, VisionTransformer | NaFlexVit)  # NLC avoids a copy
        features, maps = self.backbone.forward_intermediates(
            normalised, indices=list(blocks), output_fmt="NLC" if tokens else "NCHW"
        )
        return features, maps if tokens else [feature_map.flatten(2).mT for feature_map in maps]

    def embed_with_patches(self, normalised: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the embeddings of the images, and of their patches after the same final normalisation.

        With attention pooling, as in SigLIP, each patch is pooled alone, like an image of one patch.

        Returns:
            The embeddings of the images (B, D) and of the patches (B, N', D), row by row.

        Raises:
            InputError: if two parts embed the image, as in a distilled DeiT, or if layers after or in the pooling of a
                CNN do.
        """
        features = self.backbone.forward_features(normalised)
        embeddings = self.pool(features)
        vit = isinstance(self.backbone, VisionTransformer | NaFlexVit)
        if vit and self.embed_dim == self.backbone.embed_dim:
            patches = features[:, self.backbone.num_prefix_tokens :]
            if self.backbone.attn_pool is None:
                return embeddings, self.backbone.fc_norm(patches)
            return embeddings, self.pool(patches.flatten(0, 1)[:, None]).unflatten(0, patches.shape[:2])
        return embeddings, self.positions(features)

    def positions(self, features: Tensor) -> Tensor:
        """The positions of the last map of a CNN or Swin, (B, P, D); raises what `embed_with_patches` does."""
        after_pooling = getattr(getattr(self.backbone, "head", None), "norm", nn.Identity())
        if features.dim() == 4 and isinstance(after_pooling, nn.Identity):
            if features.shape[-1] == self.embed_dim:  # Swin, channels last
                return features.flatten(1, 2)
            if features.shape[1] == self.embed_dim:
                return features.flatten(2).mT
        raise InputError(
            f"expected a model that can embed single patches like images, got {self.name}: take a ViT with a class"
            " token or average pooling, a Swin or a ResNet"
        )

    def map_channels(self, blocks: Sequence[int]) -> list[int]:
        """Return the number of channels of each feature map that `embed_with_maps` returns for `blocks`.

        An UnsupportedModel is raised if there are no feature maps, an InputError for other than some blocks in order.
        """
        if not blocks:
            raise InputError(f"expected blocks of {self.name} to read, got none: give one or more, such as blocks=[0]")
        info = list(getattr(self.backbone, "feature_info", []))
        if not info or not hasattr(self.backbone, "forward_intermediates"):
            raise UnsupportedModel("a model with feature maps", self.name, "a transformer or a CNN, or RISE")
        if list(blocks) != sorted(set(blocks)) or not all(0 <= block < len(info) for block in blocks):
            known = f"blocks of {self.name} from 0 to {len(info) - 1}, each once and in ascending order"
            raise InputError(f"expected {known}, got {list(blocks)}")
        return [info[block]["num_chs"] for block in blocks]

    def classify(self, embeddings: Tensor) -> Tensor:
        """Compute H: embeddings (..., D) → logits (..., K).

        The head runs in float32 even under autocast, because attributions are small differences of logits.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.head(embeddings.float())

    def outputs(self, normalised: Tensor) -> Tensor:
        """Compute the logits of normalised images (B, C, H, W), (B, K); without a head, embeddings."""
        embeddings = self.embed(normalised)
        return self.head.layers(embeddings) if isinstance(self.head, NoHead) else self.classify(embeddings)

    def scores(self, logits: Tensor) -> Tensor:
        """Turn logits (..., K) into what the model states: probabilities, or values, see `scores.Score`."""
        return scale_logits(logits, self.score)

    def score_images(self, normalised: Tensor) -> Tensor:
        """Compute f: normalised images (B, C, H, W) → the scores of all classes (B, K)."""
        return self.scores(self.classify(self.embed(normalised)))

    def forward(self, images: Tensor) -> Tensor:
        """Classify uint8 images (B, C, H, W) → logits (B, K)."""
        return self.classify(self.embed(self.normalise(images)))

    def pool(self, features: Tensor) -> Tensor:
        """Reduce the output of the last layer, (B, T, D) or a feature map, to embeddings (B, D)."""
        if self.distilled:  # timm would average the two tokens, which have a head each
            return features[:, :2].flatten(1)
        return self.backbone.forward_head(features, pre_logits=True)
