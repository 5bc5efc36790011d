"""Whether gradients pass through the layers of a model."""

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from explainers.errors import UnsupportedModel
from explainers.models.model import TargetModel

BY_MASKS = "a method by masks, such as RISE or Occlusion"

_passed: WeakKeyDictionary[TargetModel, dict[Hashable, WeakSet[nn.Module]]] = WeakKeyDictionary()
"""Target → what was computed → the layers of its backbone that did not cut the graph then."""


@contextmanager
def check_gradients(target: TargetModel, what: Hashable) -> Iterator[None]:
    """Raise an UnsupportedModel for a layer, called inside this context, that cuts the graph.

    Quantised layers do, and those that compute inside `torch.no_grad`. Gradients that pass by them, over skip
    connections, are none of the model. A layer whose output does not depend on the values of its input cuts nothing.

    A layer of the backbone is checked once for each computation (`what`): hooks on all layers make every pass slower.
    """
    passed = _passed.setdefault(target, {}).setdefault(what, WeakSet())
    new = [(name, layer) for name, layer in _layers(target.backbone) if layer not in passed]
    called: list[nn.Module] = []
    with ExitStack() as stack:
        for name, layer in [*new, ("head", target.head), *_layers(target.head, "head.")]:
            stack.callback(layer.register_forward_hook(partial(_check, target, name)).remove)
        for _, layer in new:
            stack.callback(layer.register_forward_hook(lambda layer, *_: called.append(layer)).remove)
        yield
    passed.update(called)


def compute_gradient(inputs: Tensor, scores: Tensor, target: TargetModel, where: str) -> Tensor:
    """The gradient of the sum of scores at their inputs; an UnsupportedModel that names `where` if there is none."""
    found = torch.autograd.grad(scores.sum(), inputs, allow_unused=True)[0] if scores.requires_grad else None
    if found is None:
        raise no_gradient(target, where)
    return found


def no_gradient(target: TargetModel, where: str) -> UnsupportedModel:
    """The error for a model without a gradient at one of its parts."""
    got = f"{target.name} without one at {where}"
    return UnsupportedModel("a model whose layers all have gradients", got, BY_MASKS)


def _layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Name → layer, of those that take hooks: neither scripted nor compiled ones."""
    for name, layer in module.named_children():
        if not isinstance(layer, torch.jit.ScriptModule) and not hasattr(layer, "_orig_mod"):
            yield f"{prefix}{name}", layer
            yield from _layers(layer, f"{prefix}{name}.")


def _check(target: TargetModel, name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Raise an error if only the output, a floating-point tensor, has no gradient, though it depends on the inputs."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return
    if output.grad_fn is not None and "NotImplemented" not in output.grad_fn.name():  # the name for quantised layers
        return
    if any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        zeros = [torch.zeros_like(each) if isinstance(each, Tensor) else each for each in inputs]
        if not torch.equal(layer(*zeros), output):
            raise no_gradient(target, f"{name} ({type(layer).__name__})")
