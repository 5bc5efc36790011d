"""Takes off what wraps a model or its layers, such as DataParallel and torch.compile; merges adapters, such as LoRA.

Nothing here imports peft: the methods of its objects are called.
"""

import copy
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from explainers.errors import InputError
from explainers.runtime.modes import ordinary_tensors
from explainers.saved.identity import is_changed

WRAPPERS = {
    "AveragedModel",
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ModelEmaV2",
    "ModelEmaV3",
    "_FabricModule",
}
"""Classes of torch, timm and Lightning that forward to their attribute `module`."""

HELD = (nn.Module, Tensor, MethodType, FunctionType, partial, list, dict, set, deque)
"""What a function holds that is copied with it; anything else is shared."""


def take_off_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers, and say in one line on stderr what was taken off.

    The caller's model stays as it is: where adapters are merged, or layers are wrapped, the result is a copy.
    """
    taken = []
    while (inner := _unwrap(model)) is not model:
        taken.append(type(model).__name__)
        model = inner
    if wrapped := {type(part).__name__ for part in model.modules() if _is_wrapped(part)}:
        model = copy_module(model)
        _unwrap_layers(model)
    if taken or wrapped:
        names = ", ".join([*taken, *sorted(wrapped)])
        print(f"{names}: taken off, and {type(model).__name__} inside is explained", file=sys.stderr, flush=True)
    return model


def share_weights(model: nn.Module) -> dict[int, Any]:
    """A memo with which `copy_module` copies modules, hooks and buffers, but not the memory of weights."""
    plain = (weight for weight in model.parameters() if type(weight) is nn.Parameter and not weight.is_inference())
    return {id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in plain}


def copy_module(model: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """Copy a module, without gradients, as `copy_attributes` does; an InputError if it cannot be copied.

    Args:
        model: the module.
        memo: that of `copy.deepcopy`.
    """
    name, memo = type(model).__name__, {} if memo is None else memo
    try:
        with ordinary_tensors(), _Detached():  # copies of scripted weights would have a graph to the original
            own: Any = copy.deepcopy(model, memo)
        copied = own.modules() if isinstance(own, nn.Module) else [model]
        if {id(part) for part in copied} & {id(part) for part in model.modules()}:
            raise TypeError("its __deepcopy__, or that of a module inside, returns no copy")
    except Exception as error:  # a module may hold anything: a lock, a file
        raise InputError(
            f"expected a module that copy.deepcopy can copy, got {name}, which raises {type(error).__name__}: {error}:"
            " give it a __deepcopy__, or keep what cannot be copied outside of the module"
        ) from error
    _copy_functions(own, memo)
    own.zero_grad(set_to_none=True)
    return own


def copy_attributes(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a module by its attributes, as a `__deepcopy__`; tensors with a graph, such as activations, are detached."""
    own = type(module).__new__(type(module))
    memo[id(module)] = own
    with ordinary_tensors(), _Detached():
        vars(own).update(copy.deepcopy(vars(module), memo))
    _copy_functions(own, memo)
    return own


class _Detached(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors with a graph, without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not (args[0].is_leaf and args[0].grad is None):
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _copy_functions(own: nn.Module, memo: dict[int, Any]) -> None:
    """Let the hooks and replaced methods of a copied module refer to the copies of what they hold."""
    for part in own.modules():
        tables: list[dict[Any, Any]] = [vars(part), part._forward_hooks, part._forward_pre_hooks]
        for held in tables:
            functions = {key: value for key, value in held.items() if isinstance(value, FunctionType)}
            held.update({key: _copy_held(value, memo) for key, value in functions.items()})


def _copy_held(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a function with what it holds in its closure and defaults; other values by `copy.deepcopy`."""
    value = getattr(value, "_torchdynamo_orig_callable", value)  # of torch.compile
    holds = isinstance(value, FunctionType) and (
        value.__closure__ or any(isinstance(each, HELD) for each in value.__defaults__ or ())
    )
    if not holds or id(value) in memo:
        with ordinary_tensors(), _Detached(), suppress(Exception):  # what cannot be copied is shared
            return copy.deepcopy(value, memo) if isinstance(value, HELD) else value
        return value
    cells = tuple(CellType() for _ in value.__closure__ or ())
    own = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    memo[id(value)] = own
    vars(own).update(vars(value))
    own.__qualname__, own.__module__, own.__kwdefaults__ = value.__qualname__, value.__module__, value.__kwdefaults__
    own.__defaults__ = value.__defaults__ and tuple(_copy_held(each, memo) for each in value.__defaults__)
    for cell, held in zip(cells, value.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            cell.cell_contents = _copy_held(held.cell_contents, memo)
    return own


def _is_wrapped(part: nn.Module) -> bool:
    """Whether `_unwrap` takes something off."""
    names = ("_orig_mod", "merge_and_unload", "get_base_layer")
    return not is_changed(part) and (_is_wrapper(part) or any(hasattr(part, name) for name in names))


def _is_wrapper(part: nn.Module) -> bool:
    kind = type(part)
    return kind.__name__ in WRAPPERS and kind.__module__.startswith(("torch.", "timm.", "lightning."))


def _unwrap(part: Any) -> nn.Module:
    """Take one wrapper off a module; adapters are merged in a copy. Other modules are returned as they are."""
    inner: nn.Module = part
    if is_changed(part):  # what a hook changes would be lost
        return part
    if hasattr(part, "_orig_mod"):  # of torch.compile
        inner = part._orig_mod
    elif hasattr(part, "merge_and_unload"):  # of peft
        inner = copy_module(part).merge_and_unload()
    elif hasattr(part, "get_base_layer"):  # a layer with adapters, of peft
        merged = copy_module(part)
        merged.merge()
        inner = merged.get_base_layer()
    elif _is_wrapper(part):
        inner = part.module
    return inner


def _unwrap_layers(model: nn.Module) -> None:
    """Take the wrappers off all layers of a model, which is changed in place."""
    for name, layer in model.named_children():
        while (inner := _unwrap(layer)) is not layer:
            layer = inner
        setattr(model, name, layer)
        _unwrap_layers(layer)
