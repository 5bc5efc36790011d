"""Any module that classifies images as a model to explain.

A target reads a part of the interface of timm's models, and `PlainBackbone` gives a module that part. A few random
images tell its logits, its last linear layer and its feature maps. That layer becomes the head where that leaves the
logits the same; otherwise the embedding is the logits.
"""

import re
import sys
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
from explainers.masking import default_patch_size
from explainers.models.heads import NoHead
from explainers.models.mapping import Inputs, check_stated
from explainers.models.model import TargetModel
from explainers.models.names import list_names
from explainers.models.outputs import UNIT, are_embeddings, check_no_probabilities
from explainers.models.wrappers import copy_module

PLANAR = tuple(f"torch.nn.modules.{kind}" for kind in ("conv", "batchnorm", "pooling", "activation"))
"""Files of torch's layers that turn feature maps into feature maps."""

ADVICE = (
    (r"\b5D |expected 5", "videos and volumes are not explained: give a module that takes one frame or slice of them"),
    ("positional arg", "fix its further inputs by name, as in as_target(functools.partial(model, second=...), ...)"),
    ("same device|two devices", "move all of it to one device"),
    (r"to have \d+ channels", "give mean and std as one number for each of its channels"),
    (
        "dtype|scalar type|nput type|Half|Double|BFloat16",
        "it has to take float32: give model.float(), and leave out its own casts",
    ),
    ("size|shape|dimension|[Hh]eight|[Ww]idth", "give the image_size of its training"),
    ("", "it has to take such images, one or more at once: call it on some to see why it does not"),
)
"""Patterns of the errors that a module raises for images, and what to do; the first that fits."""

WEIGHTED = ("Convolution", "Addmm", "Mm", "Linear")
"""What the names of a graph's nodes begin with whose layers have weights."""


class PlainBackbone(nn.Module):
    """A module of images with the part of timm's interface that a `TargetModel` and feature maps need.

    It maps normalised images (B, C, H, W) to embeddings (B, D), as `take_logits` finds them in its output. H and W are
    `size`, D is `width`, and `probed` is what `probe` found about the module.
    """

    def __init__(
        self,
        model: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        size: tuple[int, int],
        patch_size: int,
        width: int,
        probed: "Probed",
        transform: ImageTransform,
    ) -> None:
        super().__init__()
        self.model = model
        self.head_hidden_size = width
        self.differentiable = probed.differentiable
        self.repeats_layers = probed.repeats
        self.largest_batch = probed.largest_batch
        self.in_chans = len(mean)
        self.pretrained_cfg = {
            "architecture": model._get_name(),
            "input_size": (len(mean), *size),
            "mean": tuple(mean),
            "std": tuple(std),
            "transform": transform,
        }
        self.patch_embed = SimpleNamespace(img_size=size, strict_img_size=True)
        self.default_patch_size = patch_size
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": channels, "module": f"model.{name}"} for name, channels in filter(None, [probed.feature_map()])
        ]

    def forward_features(self, normalised: Tensor) -> Tensor:
        """Embed normalised images (B, C, H, W) → (B, D)."""
        logits, self.largest_batch = run_in_batches(self.model, normalised.contiguous(), self.largest_batch)
        return logits

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
            features = self.forward_features(normalised)
            calls = -(-len(normalised) // self.largest_batch)  # those of a call that failed are left out
            return features, [torch.cat(maps[-calls:])]
        finally:
            hook.remove()

    def reset_classifier(self, num_classes: int) -> None:
        """Do nothing: there is no classification layer."""

    def forward(self, normalised: Tensor) -> Tensor:
        return self.forward_features(normalised)


def plain_target(model: nn.Module, inputs: Inputs) -> TargetModel:
    """Make a target of any module that maps normalised float images (B, C, H, W) to logits (B, K).

    The module returns its logits as a tensor, as an output or a dictionary with `logits`, or as the first of a tuple.
    It is copied, and stays as it is. All masks and metrics work; gradients of pixels, where the logits have them; and
    CAM, where nothing but vectors follows the last feature map.

    Args:
        model: the module.
        inputs: the images of its training. Without a transform, photos become their middle squares.

    Returns:
        The target, in eval mode, on the device of the module.

    Raises:
        InputError: if mean, std or size is not known, or if the module is not such a classifier, see `probe`, or
            returns probabilities.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    >>> target = plain_target(net, Inputs((32, 32), [0.5] * 3, [0.5] * 3, "as given"))
    >>> target(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape, target.embed_dim, target.grid.shape
    (torch.Size([2, 5]), 8, (8, 8))
    """
    check_stated(model, mean=inputs.mean, std=inputs.std, image_size=inputs.size)
    assert inputs.mean is not None and inputs.std is not None and inputs.size is not None  # for the type checker
    patch_size = default_patch_size(inputs.size)
    own = copy_module(model).float().eval()
    images = probe_images(own, (len(inputs.mean), *inputs.size))
    probed = probe(own, images)
    if inputs.score != "value":
        check_no_probabilities(probed.logits, model._get_name())
    if are_embeddings(probed.logits, inputs):
        print(f"{model._get_name()}: {UNIT}", file=sys.stderr, flush=True)
        head: nn.Module = NoHead()
    else:
        head = _take_head(own, probed, images)
    width = getattr(head, "in_features", probed.logits.shape[1])
    transform = inputs.transform or ImageTransform(inputs.size)
    backbone = PlainBackbone(own, inputs.mean, inputs.std, inputs.size, patch_size, width, probed, transform)
    with torch.no_grad():  # as in `copy_module`
        target = TargetModel(backbone, head, inputs.score).eval()
    target.backbone.to(memory_format=torch.contiguous_format)  # a module may call .view
    target.classes = list_names(inputs.classes, target.num_classes) if inputs.classes else []
    return target.to(probed.logits.device)


def _take_head(model: nn.Module, probed: "Probed", images: Tensor) -> nn.Module:
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
                embeddings = take_logits(model(images), model._get_name())
                if torch.allclose(head(embeddings), probed.logits, rtol=1e-4, atol=1e-5):
                    return head
        except Exception:  # it reads the layer's weights or attributes besides
            pass
        model.set_submodule(name, head)
    if width > 1:
        return nn.Identity()
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float32)
    nn.init.ones_(layer.weight)
    return layer


class Probed:
    """What `probe` finds: the layers of one forward pass, in the order of their calls, and its logits.

    Attributes:
        calls: name of each layer → number of its calls.
        linears: name of each linear layer of vectors → its output.
        maps: names, channels and graph of the layers that output feature maps, since the last tokens.
        repeats: whether an activation or a pooling is called several times in one pass, or may be.
        logits: of three images, (3, K).
        largest_batch: see `run_in_batches`.
        differentiable: False if the logits have no gradient at the images.
    """

    logits: Tensor
    differentiable: bool
    largest_batch: int

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.linears: dict[str, Tensor] = {}
        self.maps: list[tuple[str, int, Any]] = []
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
        if output.dim() == 4 and min(output.shape[2:]) > 1 and is_planar(layer):
            self.maps.append((name, output.shape[1], output.grad_fn))

    def linear(self) -> str | None:
        """Name the linear layer whose output is the logits, and whose input is vectors."""
        return next((name for name, output in self.linears.items() if output is self.logits), None)

    def feature_map(self) -> tuple[str, int] | None:
        """Return name and channels of the last map of a layer that is called once, unless tokens follow it.

        A map of the logits themselves, which no layer with weights reads, counts only where there is no other.
        """
        once = [found for found in reversed(self.maps) if self.calls[found[0]] == 1]
        last = nodes_after_weights(self.logits)
        read = [found for found in once if found[2] not in last]
        return next(((name, channels) for name, channels, _ in read or once), None)


def nodes_after_weights(outputs: Tensor) -> set[Any]:
    """Find the nodes of a graph from outputs back to the last layers with weights, which are among them.

    >>> [node.name() for node in nodes_after_weights(nn.Linear(2, 1)(nn.Linear(3, 2)(torch.ones(1, 3))))]
    ['AddmmBackward0']
    """
    found, ahead = set(), [outputs.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += () if node.name().startswith(WEIGHTED) else [before for before, _ in node.next_functions]
    return found


def probe(model: nn.Module, images: Tensor) -> Probed:
    """Classify the `probe_images` by a module in eval mode, and watch its layers.

    Raises:
        InputError: if the model is not a classifier of normalised float images (B, C, H, W) of this size, or if
            its logits are not finite, are random, or depend on the other images of a batch.
    """
    name, images = model._get_name(), images.clone().requires_grad_()
    try:
        with torch.inference_mode(False), torch.enable_grad(), _record_layers(model) as probed:
            probed.logits, probed.largest_batch = run_in_batches(model, images)
            logits = probed.logits
        with torch.no_grad():
            alone = take_logits(model(images[:1]), name)
    except InputError:
        raise
    except Exception as error:  # a bug of the model or an image that is not for it: only its author can say which
        reason = next(iter(str(error).strip().splitlines()), "no message").rstrip(".:")
        spatial = "5D " * any(isinstance(layer, nn.Conv3d) for layer in model.modules())
        advice = next(advice for pattern, advice in ADVICE if re.search(pattern, spatial + reason))
        raise InputError(
            f"expected a classifier of normalised float32 images of shape (B, {', '.join(map(str, images.shape[1:]))}),"
            f" got {name}, which raises {type(error).__name__}: {reason}: {advice}"
        ) from error
    check_logits(logits.detach(), alone, name)
    try:
        (gradient,) = torch.autograd.grad(logits, images, torch.ones_like(logits), allow_unused=True)
        probed.differentiable = gradient is not None
    except RuntimeError:  # computed without a graph, or with operations without a gradient
        probed.differentiable = False
    return probed


def run_in_batches(model: nn.Module, images: Tensor, largest: int = sys.maxsize) -> tuple[Tensor, int]:
    """Compute the logits (B, K) of images by a module that may take fewer at once, such as one of an ONNX file.

    A batch on which it fails is halved, down to a single image; a line says so.

    Returns:
        The logits, and the largest batch that the module takes, as far as it is known.
    """
    name, reason, asked = model._get_name(), "", largest
    while True:
        try:
            logits = [take_logits(model(some), name) for some in images.split(largest)]
            break
        except InputError:
            raise
        except Exception as error:  # of the module
            largest = min(largest, len(images)) // 2
            if not largest:
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if largest < asked:
        print(f"{name}: takes at most {largest} images at once, as more raise {reason}", file=sys.stderr, flush=True)
    return (logits[0] if len(logits) == 1 else torch.cat(logits)), largest


def probe_images(model: nn.Module, shape: tuple[int, int, int]) -> Tensor:
    """Return two random images and the mean image, each of a shape (C, H, W), on the device of a model."""
    weight = next(model.parameters(), torch.empty(0))
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
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
            f" first of a tuple, got {type(output).__name__}: wrap the model in a module that returns its logits, or"
            " give target=, a function that reads one number for each image of what the model returns"
        )
    return logits


def check_logits(logits: Tensor, alone: Tensor, name: str) -> None:
    """Raise an InputError unless these are logits of three images, two of them random, and of the first alone."""
    if logits.dim() != 2 or len(logits) != 3 or not logits.is_floating_point():
        kind = str(logits.dtype).removeprefix("torch.")
        raise InputError(
            f"expected floating-point logits of shape (B, K) of {name}, got {kind} of shape {list(logits.shape)} for 3"
            " images: wrap the model in a module that returns one row of logits for each image, or give target=, a"
            " function that reads one number for each image"
        )
    if not logits.isfinite().all():
        where = "the mean image" if logits[:2].isfinite().all() else "random images"
        raise InputError(f"expected finite logits of {name}, got NaN or infinity for {where}: mend the model")
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
