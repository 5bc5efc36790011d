"""Takes off what wraps a model or its layers, such as DataParallel and torch.compile; merges adapters, such as LoRA.

Nothing here imports peft: its objects bring what is called.
"""

import copy
import sys
from typing import Any

from torch import nn

from explainers.errors import InputError
from explainers.runtime.modes import ordinary_tensors

WRAPPERS = {
    "AveragedModel",
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ModelEmaV2",
    "ModelEmaV3",
    "_FabricModule",
}
"""Classes of torch, timm and Lightning whose forward is that of their attribute `module`."""


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


def copy_module(model: nn.Module) -> nn.Module:
    """Copy a module, without gradients; an InputError if it has no weights or cannot be copied."""
    name = type(model).__name__
    if any(weight.is_meta for weight in (*model.parameters(), *model.buffers())):
        raise InputError(f"expected {name} with weights, got one on the meta device: load its weights first")
    try:
        with ordinary_tensors():  # copies of scripted weights would have a graph to the original
            own = copy.deepcopy(model)
    except Exception as error:  # a module may hold anything: a lock, a file, a tensor with a graph
        raise InputError(
            f"expected a module that copy.deepcopy can copy, got {name}, which raises {type(error).__name__}: {error}:"
            " give it a __deepcopy__, or keep what cannot be copied outside of the module"
        ) from error
    own.zero_grad(set_to_none=True)
    return own


def _is_wrapped(part: nn.Module) -> bool:
    """Whether `_unwrap` takes something off."""
    return _is_wrapper(part) or any(hasattr(part, name) for name in ("_orig_mod", "merge_and_unload", "get_base_layer"))


def _is_wrapper(part: nn.Module) -> bool:
    kind = type(part)
    return kind.__name__ in WRAPPERS and kind.__module__.startswith(("torch.", "timm.", "lightning."))


def _unwrap(part: Any) -> nn.Module:
    """Take one wrapper off a module; adapters are merged in a copy. Other modules are returned as they are."""
    inner: nn.Module = part
    if hasattr(part, "_orig_mod"):  # of torch.compile
        inner = part._orig_mod
    elif hasattr(part, "merge_and_unload"):  # of peft
        inner = copy.deepcopy(part).merge_and_unload()
    elif hasattr(part, "get_base_layer"):  # a layer with adapters, of peft
        merged = copy.deepcopy(part)
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
