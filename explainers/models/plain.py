"""Any module that classifies images as a model to explain.

A target reads a part of the interface of timm's models, and `PlainBackbone` gives a module that part. The module's last
linear layer becomes the head where that leaves the logits the same; otherwise the embedding is the logits.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.models.model import TargetModel
from explainers.models.probing import Probed, logits_of, probe, probe_images
from explainers.models.settings import Statistics, channels, check_image_size, class_names

PATCH = 16
"""Largest side of a patch by default, in pixels."""
SIDE = 7
"""Smallest number of patches per side by default."""


class PlainBackbone(nn.Module):
    """A module of images with the part of timm's interface that a `TargetModel` and feature maps need.

    Args:
        model: maps normalised images (B, 3, S, S) to embeddings (B, D), as `logits_of` finds them in its output.
        mean: mean of the pixels of each channel, from 0 to 1.
        std: their standard deviation.
        image_size: S, in pixels.
        patch_size: side of a patch by default, in pixels.
        width: D.
        probed: what `probe` found about the module.
    """

    def __init__(
        self,
        model: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        image_size: int,
        patch_size: int,
        width: int,
        probed: Probed,
    ) -> None:
        super().__init__()
        size = image_size, image_size
        self.model = model
        self.head_hidden_size = width
        self.differentiable = probed.differentiable
        self.repeats_layers = probed.repeats
        self.pretrained_cfg = {
            "architecture": type(model).__name__,
            "input_size": (3, *size),
            "mean": tuple(mean),
            "std": tuple(std),
        }
        self.patch_embed = SimpleNamespace(img_size=size, strict_img_size=True)
        self.default_patch_size = patch_size
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": channels, "module": f"model.{name}"} for name, channels in filter(None, [probed.feature_map])
        ]

    def forward_features(self, normalised: Tensor) -> Tensor:
        """Embed normalised images (B, 3, S, S) → (B, D)."""
        return logits_of(self.model(normalised.contiguous()), type(self.model).__name__)

    def forward_head(self, features: Tensor, pre_logits: bool = True) -> Tensor:
        """Return the embeddings, (B, D): the head is no part of the backbone."""
        return features

    def forward_intermediates(
        self, normalised: Tensor, indices: Sequence[int], output_fmt: str = "NCHW"
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the embeddings (B, D), and the last feature map (B, C, h, w), whose index is 0."""
        maps: list[Tensor] = []
        layer = self.get_submodule(self.feature_info[indices[0]]["module"])
        hook = layer.register_forward_hook(lambda *call: maps.append(call[-1]))
        try:
            return self.forward_features(normalised), maps
        finally:
            hook.remove()

    def reset_classifier(self, num_classes: int) -> None:
        """Do nothing: there is no classification layer."""

    def forward(self, normalised: Tensor) -> Tensor:
        return self.forward_features(normalised)


def default_patch_size(image_size: int) -> int:
    """Return the largest side of a patch up to 16 pixels that cuts an image into at least 7 × 7 patches.

    Raises:
        InputError: if this is no size, or if only patches of one pixel divide the image.

    >>> [default_patch_size(size) for size in (224, 96, 32, 28)]
    [16, 12, 4, 4]
    """
    check_image_size(image_size)
    sides = [side for side in range(2, PATCH + 1) if image_size % side == 0 and image_size // side >= SIDE]
    if not sides and image_size > SIDE * 2:
        raise InputError(
            f"expected an image_size that patches of 2 to {PATCH} pixels divide, got {image_size}: give another that"
            f" the model takes, such as {image_size - image_size % PATCH or PATCH}"
        )
    return max(sides, default=1)


def plain_target(
    model: nn.Module,
    mean: Statistics = None,
    std: Statistics = None,
    image_size: int | None = None,
    classes: Sequence[str] = (),
) -> TargetModel:
    """Make a target of any module that maps normalised float images (B, 3, S, S) to logits (B, K).

    The module returns its logits as a tensor, as an output or a dictionary with `logits`, or as the first of a tuple.
    It is copied, and stays as it is. All masks and metrics work; gradients of pixels, where the logits have them; and
    CAM, where nothing but vectors follows the last feature map.

    Args:
        model: the module.
        mean: mean of the pixels of its training, from 0 to 1, one for all channels or one for each.
        std: their standard deviation, likewise.
        image_size: S, the side of the images of its training, in pixels.
        classes: names of the classes in the order of the logits; empty if they are not known.

    Returns:
        The target, in eval mode, on the device of the module.

    Raises:
        InputError: if the mean, the standard deviation or the size is not given, or if the module is not such a
            classifier, see `probe`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    >>> target = plain_target(net, mean=0.5, std=0.5, image_size=32)
    >>> target(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape, target.embed_dim, target.grid.side
    (torch.Size([2, 5]), 8, 8)
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile, which would compile each probe
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {name}: wrap it in a module whose forward returns logits")
    stated = {"mean": mean, "std": std, "image_size": image_size}
    missing = [key for key, value in stated.items() if value is None]
    if mean is None or std is None or image_size is None:
        raise InputError(
            f"expected mean, std and image_size of the images on which {name} was trained, got no"
            f" {' and no '.join(missing)}: give as_target(model, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),"
            " image_size=224), as for ImageNet, in its place; mean=0, std=1 if it takes pixels from 0 to 1"
        )
    means, stds = channels("mean", mean, 3), channels("std", std, 3)
    patch_size = default_patch_size(image_size)
    own = _copy(model).eval()
    probed = probe(own, image_size)
    head = _take_head(own, probed, image_size)
    width = getattr(head, "in_features", probed.logits.shape[1])
    backbone = PlainBackbone(own, means, stds, image_size, patch_size, width, probed)
    with torch.no_grad():  # as in `_copy`
        target = TargetModel(backbone, head).eval()
    target.backbone.to(memory_format=torch.contiguous_format)  # a module may call .view
    target.classes = class_names(classes, target.num_classes) if classes else []
    return target.to(probed.logits.device)


def _copy(model: nn.Module) -> nn.Module:
    """Copy a module, without gradients."""
    name = type(model).__name__
    if any(weight.is_meta for weight in (*model.parameters(), *model.buffers())):
        raise InputError(f"expected {name} with weights, got one on the meta device: load its weights first")
    try:
        with torch.no_grad():  # copies of scripted weights would have a graph to the original
            own = copy.deepcopy(model)
    except Exception as error:  # a module may hold anything: a lock, a file, a tensor with a graph
        raise InputError(
            f"expected a module that copy.deepcopy can copy, got {name}, which raises {type(error).__name__}: {error}:"
            " keep what cannot be copied outside of the module"
        ) from error
    own.zero_grad(set_to_none=True)
    return own


def _take_head(model: nn.Module, probed: Probed, image_size: int) -> nn.Module:
    """Take the last linear layer off a module, which is changed in place, if the layer on what remains is the module.

    Returns:
        The layer; otherwise the identity, and the module stays as it is.
    """
    width = probed.logits.shape[1]
    if probed.linear is None:
        return _identity(width)
    head = model.get_submodule(probed.linear)
    model.set_submodule(probed.linear, nn.Identity())
    try:
        with torch.no_grad():
            embeddings = logits_of(model(probe_images(model, image_size)), type(model).__name__)
            same = torch.allclose(head(embeddings), probed.logits, rtol=1e-4, atol=1e-5)
    except Exception:  # it reads the layer's weights or attributes besides
        same = False
    if same:
        return head
    model.set_submodule(probed.linear, head)
    return _identity(width)


def _identity(width: int) -> nn.Module:
    """Return the identity of logits (B, width); of a single logit as a linear layer, from which a target makes two."""
    if width > 1:
        return nn.Identity()
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer
