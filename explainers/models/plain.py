"""Any module that classifies images as a model to explain.

A target reads a part of the interface of timm's models, and `PlainBackbone` gives a module that part. A few random
images tell its logits, its last linear layer and its feature maps. That layer becomes the head where that leaves the
logits the same; otherwise the embedding is the logits.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.models.mapping import Statistics, channels, check_image_size
from explainers.models.model import TargetModel
from explainers.models.names import list_names
from explainers.models.wrappers import copy_module

PATCH = 16
"""Largest side of a patch by default, in pixels."""
SIDE = 7
"""Smallest number of patches per side by default."""
PLANAR = tuple(f"torch.nn.modules.{kind}" for kind in ("conv", "batchnorm", "pooling", "activation"))
"""Files of torch's layers that turn feature maps into feature maps."""


class PlainBackbone(nn.Module):
    """A module of images with the part of timm's interface that a `TargetModel` and feature maps need.

    It maps normalised images (B, 3, S, S) to embeddings (B, D), as `take_logits` finds them in its output. S is
    `image_size`, D is `width`, and `probed` is what `probe` found about the module.
    """

    def __init__(
        self,
        model: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        image_size: int,
        patch_size: int,
        width: int,
        probed: "Probed",
        transform: ImageTransform | None = None,
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
            "transform": transform or ImageTransform(size),
        }
        self.patch_embed = SimpleNamespace(img_size=size, strict_img_size=True)
        self.default_patch_size = patch_size
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": channels, "module": f"model.{name}"} for name, channels in filter(None, [probed.feature_map()])
        ]

    def forward_features(self, normalised: Tensor) -> Tensor:
        """Embed normalised images (B, 3, S, S) → (B, D)."""
        return take_logits(self.model(normalised.contiguous()), type(self.model).__name__)

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
        InputError: if only patches of one pixel divide the image.

    >>> [default_patch_size(size) for size in (224, 96, 32, 28)]
    [16, 12, 4, 4]
    """
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
    transform: ImageTransform | None = None,
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
        transform: how photos become the images of its training; `None` crops their middle squares.

    Returns:
        The target, in eval mode, on the device of the module.

    Raises:
        InputError: if mean, std or image_size is not given, or if the module is not such a classifier, see `probe`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    >>> target = plain_target(net, mean=0.5, std=0.5, image_size=32)
    >>> target(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape, target.embed_dim, target.grid.side
    (torch.Size([2, 5]), 8, 8)
    """
    check_stated(model, mean=mean, std=std, image_size=image_size)
    assert image_size is not None  # for the type checker
    means, stds = channels("mean", mean, 3), channels("std", std, 3)
    check_image_size(image_size)
    patch_size = default_patch_size(image_size)
    own = copy_module(model).eval()
    probed = probe(own, image_size)
    head = _take_head(own, probed, image_size)
    width = getattr(head, "in_features", probed.logits.shape[1])
    backbone = PlainBackbone(own, means, stds, image_size, patch_size, width, probed, transform)
    with torch.no_grad():  # as in `copy_module`
        target = TargetModel(backbone, head).eval()
    target.backbone.to(memory_format=torch.contiguous_format)  # a module may call .view
    target.classes = list_names(classes, target.num_classes) if classes else []
    return target.to(probed.logits.device)


def check_stated(model: nn.Module, **stated: Any) -> None:
    """Raise an InputError for a setting of `as_target` that is None, where the model does not say it."""
    missing = " and no ".join(key for key, value in stated.items() if value is None)
    if missing:
        *others, last = stated
        raise InputError(
            f"expected {', '.join(others)} and {last} of the images on which {type(model).__name__} was trained, got no"
            f" {missing}: give as_target(model, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),"
            " image_size=224), as for ImageNet, in its place; mean=0, std=1 if it takes pixels from 0 to 1"
        )


def _take_head(model: nn.Module, probed: "Probed", image_size: int) -> nn.Module:
    """Take the last linear layer off a module, which is changed in place, if the layer on what remains is the module.

    Returns:
        The layer; otherwise the identity, of a single logit as a linear layer, from which a target makes two. The
        module then stays as it is.
    """
    name, width = probed.linear(), probed.logits.shape[1]
    if name is not None:
        head = model.get_submodule(name)
        model.set_submodule(name, nn.Identity())
        try:
            with torch.no_grad():
                embeddings = take_logits(model(probe_images(model, image_size)), type(model).__name__)
                if torch.allclose(head(embeddings), probed.logits, rtol=1e-4, atol=1e-5):
                    return head
        except Exception:  # it reads the layer's weights or attributes besides
            pass
        model.set_submodule(name, head)
    if width > 1:
        return nn.Identity()
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


class Probed:
    """What `probe` finds: the layers of one forward pass, in the order of their calls, and its logits.

    Attributes:
        calls: name of each layer → number of its calls.
        linears: name of each linear layer of vectors → its output.
        maps: names and channels of the layers that output square feature maps, since the last tokens.
        repeats: whether an activation or a pooling is called several times in one pass, or may be.
        logits: of three images, (3, K).
        differentiable: False if the logits have no gradient at the images.
    """

    logits: Tensor
    differentiable: bool

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.linears: dict[str, Tensor] = {}
        self.maps: list[tuple[str, int]] = []
        self.repeats = False

    def record(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        """Record a call."""
        self.calls[name] += 1
        if not isinstance(output, Tensor):
            return
        self.repeats |= self.calls[name] > 1 and type(layer).__module__.endswith(("activation", "pooling"))
        if type(layer) is nn.Linear and inputs and inputs[0].dim() == 2:
            self.linears[name] = output
        if output.dim() == 3 or output.dim() == 4 and type(layer) in (nn.Linear, nn.LayerNorm):
            self.maps.clear()  # tokens
        if output.dim() == 4 and output.shape[2] == output.shape[3] > 1 and is_planar(layer):
            self.maps.append((name, output.shape[1]))

    def linear(self) -> str | None:
        """Name the linear layer whose output is the logits, and whose input is vectors."""
        return next((name for name, output in self.linears.items() if output is self.logits), None)

    def feature_map(self) -> tuple[str, int] | None:
        """Return name and channels of the last square map of a layer that is called once, unless tokens follow it."""
        return next(((name, channels) for name, channels in reversed(self.maps) if self.calls[name] == 1), None)


def probe(model: nn.Module, image_size: int) -> Probed:
    """Classify two random images and the mean image by a module in eval mode, and watch its layers.

    Raises:
        InputError: if the model is not a classifier of normalised float images (B, 3, image_size, image_size), or if
            its logits are not finite, are probabilities, are random, or depend on the other images of a batch.
    """
    name, images = type(model).__name__, probe_images(model, image_size).requires_grad_()
    try:
        with torch.inference_mode(False), torch.enable_grad(), _record_layers(model) as probed:
            logits = probed.logits = take_logits(model(images), name)
        with torch.no_grad():
            alone = take_logits(model(images[:1]), name)
    except InputError:
        raise
    except Exception as error:  # a bug of the model or an image that is not for it: only its author can say which
        reason = next(iter(str(error).strip().splitlines()), "no message").rstrip(".:")
        raise InputError(
            f"expected a classifier of normalised float32 images of shape (B, 3, {image_size}, {image_size}), got"
            f" {name}, which raises {type(error).__name__}: {reason}: give the image_size of its training, and a model"
            " in float32 (model.float()) for 3 channels"
        ) from error
    check_logits(logits.detach(), alone, name)
    try:
        (gradient,) = torch.autograd.grad(logits, images, torch.ones_like(logits), allow_unused=True)
        probed.differentiable = gradient is not None
    except RuntimeError:  # computed without a graph, or with operations without a gradient
        probed.differentiable = False
    return probed


def probe_images(model: nn.Module, image_size: int) -> Tensor:
    """Return two random images and the mean image, (3, 3, image_size, image_size), on the device of a model."""
    weight = next(model.parameters(), torch.empty(0))
    noise = torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    return torch.cat([noise, torch.zeros_like(noise[:1])]).to(weight.device)


def take_logits(output: Any, name: str) -> Tensor:
    """Take the logits out of what a model returns: a tensor, an output or dictionary with `logits`, or a tuple's first.

    An InputError names the model for anything else.

    >>> take_logits({"logits": torch.ones(2, 5), "loss": None}, "Net").shape
    torch.Size([2, 5])
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, tuple) and logits else logits
    if not isinstance(logits, Tensor):
        raise InputError(
            f"expected logits (B, K) of {name}, as a tensor, an output with .logits, a dictionary with 'logits', or the"
            f" first of a tuple, got {type(output).__name__}: wrap the model in a module that returns its logits"
        )
    return logits


def check_logits(logits: Tensor, alone: Tensor, name: str) -> None:
    """Raise an InputError unless these are logits of three images, of which two are random, and of the first alone."""
    if logits.dim() != 2 or len(logits) != 3 or not logits.is_floating_point():
        kind = str(logits.dtype).removeprefix("torch.")
        raise InputError(
            f"expected floating-point logits of shape (B, K) of {name}, got {kind} of shape {list(logits.shape)} for 3"
            " images: wrap the model in a module that returns one row of logits for each image"
        )
    if not logits.isfinite().all():
        where = "the mean image" if logits[:2].isfinite().all() else "random images"
        raise InputError(f"expected finite logits of {name}, got NaN or infinity for {where}: mend the model")
    sums_to_1 = logits.shape[1] > 1 and torch.allclose(logits.sum(1), torch.ones(3).to(logits), atol=1e-4)
    if sums_to_1 and (logits >= 0).all():
        raise InputError(
            f"expected logits of {name}, got probabilities, which sum to 1: leave out its softmax, or return their"
            " logarithm"
        )
    difference = (logits[:1] - alone).abs().max().item() if alone.shape == logits[:1].shape else float("nan")
    if not difference <= 1e-3 * max(1.0, logits.abs().max().item()):
        raise InputError(
            f"expected {name} to give an image the same logits at every call and in every batch, got a difference of"
            f" {difference:.2g}: switch off randomness (F.dropout needs training=self.training) and statistics of the"
            " batch"
        )


def is_planar(layer: nn.Module) -> bool:
    """Whether the four dimensions of what a layer outputs are images, channels, rows and columns.

    Attention weights have four dimensions, too; layers that compute them contain no convolution.

    >>> is_planar(nn.MaxPool2d(2)), is_planar(nn.Sequential(nn.Conv2d(3, 8, 3))), is_planar(nn.Softmax(-1))
    (True, True, False)
    """
    if isinstance(layer, nn.Softmax):
        return False
    return type(layer).__module__ in PLANAR or any(isinstance(part, nn.Conv2d) for part in layer.modules())


@contextmanager
def _record_layers(model: nn.Module) -> Iterator[Probed]:
    """Record the layers of the forward pass that runs inside this context."""
    probed = Probed()
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):  # whose layers have no hooks
                probed.repeats = True
            elif name:
                stack.callback(layer.register_forward_hook(partial(probed.record, name)).remove)
        yield probed
