"""What a few random images tell about a module: its logits, its last linear layer, and its feature maps."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import InputError

PLANAR = tuple(f"torch.nn.modules.{kind}" for kind in ("conv", "batchnorm", "pooling", "activation"))
"""Files of torch's layers that turn feature maps into feature maps."""


@dataclass(frozen=True)
class Probed:
    """What `probe` finds.

    Args:
        logits: of three images, (3, K).
        linear: name of the linear layer whose output is the logits, and whose input is vectors; None if there is none.
        feature_map: name and number of channels of the layer whose output is the last feature map, a square; None if
            tokens follow the last map, or if there is none.
        repeats: whether an activation or a pooling is called several times in one pass, or may be.
        differentiable: False if the logits have no gradient at the images.
    """

    logits: Tensor
    linear: str | None
    feature_map: tuple[str, int] | None
    repeats: bool
    differentiable: bool


def probe(model: nn.Module, image_size: int) -> Probed:
    """Classify two random images and the mean image, and watch the layers.

    Args:
        model: a module in eval mode; neither it nor its gradients are changed.
        image_size: side of its images, in pixels.

    Raises:
        InputError: if the model is not a classifier of normalised float images (B, 3, image_size, image_size), or if
            its logits are not finite, are probabilities, are random, or depend on the other images of a batch.
    """
    name, images = type(model).__name__, probe_images(model, image_size).requires_grad_()
    try:
        with torch.inference_mode(False), torch.enable_grad(), watched(model) as seen:
            logits = logits_of(model(images), name)
        with torch.no_grad():
            alone = logits_of(model(images[:1]), name)
    except InputError:
        raise
    except Exception as error:  # a bug of the model or an image that is not for it: only its author can say which
        raise InputError(
            f"expected a classifier of normalised float32 images of shape (B, 3, {image_size}, {image_size}), got"
            f" {name}, which raises {type(error).__name__}: {first_line(error)}: give the image_size of"
            " its training, and a model in float32 (model.float()) for 3 channels"
        ) from error
    check_logits(logits.detach(), alone, name)
    return Probed(logits.detach(), seen.linear(logits), seen.feature_map(), seen.repeats, has_gradient(logits, images))


def probe_images(model: nn.Module, image_size: int) -> Tensor:
    """Return two random images and the mean image, (3, 3, image_size, image_size), on the device of a model."""
    weight = next(model.parameters(), torch.empty(0))
    noise = torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    return torch.cat([noise, torch.zeros_like(noise[:1])]).to(weight.device)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "no message").rstrip(".:")


def logits_of(output: Any, name: str) -> Tensor:
    """Take the logits out of what a model returns: a tensor, an output or dictionary with `logits`, or a tuple's first.

    Args:
        output: what the model returned.
        name: the model's name, for messages.

    Raises:
        InputError: for anything else.

    >>> logits_of({"logits": torch.ones(2, 5), "loss": None}, "Net").shape
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
    """Raise an InputError unless these are logits.

    Args:
        logits: of three images, of which two are random.
        alone: of the first image alone.
        name: the model's name, for messages.
    """
    if logits.dim() != 2 or len(logits) != 3 or not logits.is_floating_point():
        kind = str(logits.dtype).removeprefix("torch.")
        raise InputError(
            f"expected floating-point logits of shape (B, K) of {name}, got {kind} of shape {list(logits.shape)} for 3"
            " images: wrap the model in a module that returns one row of logits for each image"
        )
    if not logits.isfinite().all():
        where = "the mean image" if logits[:2].isfinite().all() else "random images"
        raise InputError(f"expected finite logits of {name}, got NaN or infinity for {where}: mend the model")
    if (
        (logits >= 0).all()
        and logits.shape[1] > 1
        and torch.allclose(logits.sum(1), torch.ones(3).to(logits), atol=1e-4)
    ):
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


def has_gradient(logits: Tensor, images: Tensor) -> bool:
    """Whether logits have a gradient at the images that they were computed from."""
    try:
        return torch.autograd.grad(logits, images, torch.ones_like(logits), allow_unused=True)[0] is not None
    except RuntimeError:  # computed without a graph, or with operations without a gradient
        return False


class Seen:
    """The layers of one forward pass, in the order of their calls; see `Probed`.

    Attributes:
        calls: name of each layer → number of its calls.
        linears: name of each linear layer of vectors → its output.
        maps: names and channels of the layers that output square feature maps, since the last tokens.
        repeats: whether an activation or a pooling is called several times.
    """

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

    def linear(self, logits: Tensor) -> str | None:
        """Name the linear layer whose output is the logits."""
        return next((name for name, output in self.linears.items() if output is logits), None)

    def feature_map(self) -> tuple[str, int] | None:
        """Return the last feature map of a layer that is called once."""
        return next(((name, channels) for name, channels in reversed(self.maps) if self.calls[name] == 1), None)


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
def watched(model: nn.Module) -> Iterator[Seen]:
    """Record the layers of the forward pass that runs inside this context."""
    seen = Seen()
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):  # whose layers have no hooks
                seen.repeats = True
            elif name:

                def hook(layer: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                    seen.record(name, layer, inputs, output)

                stack.callback(layer.register_forward_hook(hook).remove)
        yield seen
