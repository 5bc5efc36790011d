"""Identities: the weights, architectures and constructor arguments on which results, stored rows and weights depend.

An identity is a nested dictionary of names and JSON values. The programs reuse results, rows and weights only if the
identities are equal.
"""

import hashlib
import inspect
import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from timm.layers import DropPath, PatchDropout
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Identity = dict[str, Any]

WITHOUT_EFFECT = {
    "chunk_size": "limits the memory; batches of another size change results by rounding only",
    "num_workers": "loads the same samples faster",
}
"""Argument of any class that changes no result → reason."""

INACTIVE = (nn.Identity, nn.Dropout, DropPath, PatchDropout)
"""Layers without effect in evaluation mode."""

_hashes: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def weights_hash(module: nn.Module) -> str:
    """Compute the SHA-256 of the names and values of a module's weights.

    The hash is cached until the version counter or the sum of one of the weights changes. The sum is needed because
    writing to `.data` does not increment PyTorch's counter.
    """
    state = sorted((_drop_compiled(name), _numbers(value)) for name, value in module.state_dict().items())
    stamps = [(name, v.data_ptr(), v.dtype, v.shape, v._version, v.sum().item()) for name, v in state]
    cached = _hashes.get(module)
    if cached is not None and cached[0] == stamps:
        return cached[1]
    digest = hashlib.sha256()
    for name, value in state:
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    _hashes[module] = stamps, digest.hexdigest()
    return digest.hexdigest()


def _drop_compiled(name: str) -> str:
    """The name that a weight or layer has without `torch.compile`."""
    return f"{name}.".replace("_orig_mod.", "").removesuffix(".")


def _numbers(value: Any) -> Tensor:
    """A weight as a plain tensor; the bytes of what is none, such as the packed weights of a quantised layer."""
    if isinstance(value, Tensor) and not value.is_quantized and not is_traceable_wrapper_subclass(value):
        return value
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def architecture_hash(module: nn.Module) -> str:
    """Compute the SHA-256 of a module's architecture: the names, types and settings of its submodules.

    Settings are attributes with the name of a constructor argument, such as the number of heads, the epsilon of a
    normalisation or the size of a window. Dropout is ignored, because an explained model is in evaluation mode.

    >>> architecture_hash(nn.LayerNorm(2, eps=1e-5)) == architecture_hash(nn.LayerNorm(2, eps=1e-6))
    False
    """
    described = [
        (
            _drop_compiled(name),
            type(part).__name__,
            {key: _plain(value) for key, value in sorted(_settings(part).items())},
        )
        for name, part in module.named_modules()
        if not isinstance(part, INACTIVE) and not hasattr(part, "_orig_mod")
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module with the name of a constructor argument, except weights and submodules."""
    names = {name for kind in type(module).__mro__[:-1] for name in inspect.signature(kind).parameters}
    skipped = ("pretrained_cfg", "default_cfg", "device", "dtype")
    return {
        key: value for key, value in vars(module).items() if key in names and key not in skipped and "drop" not in key
    }


def _plain(value: Any) -> Any:
    """Convert a value to JSON values; a function becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, partial):
        return {"function": _plain(value.func), "arguments": _plain(value.args), **_plain(value.keywords)}
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


def recipe(instance: object, without: Collection[str] = ()) -> Identity:
    """Describe how an object was constructed: its class, and its arguments except those `WITHOUT_EFFECT`.

    Args:
        instance: an object that keeps every constructor argument as an attribute of the same name. The method
            `identity` of an argument, if any, describes it.
        without: names of arguments to leave out.

    Raises:
        TypeError: if the object does not keep an argument.

    >>> from explainers.masking import PatchGrid
    >>> recipe(PatchGrid(image_size=64, patch_size=8), without=["image_size", "differs"])
    {'class': 'PatchGrid', 'patch_size': 8}
    """
    described: Identity = {"class": type(instance).__name__}
    for name in inspect.signature(type(instance)).parameters:
        if name in WITHOUT_EFFECT or name in without:
            continue
        if not hasattr(instance, name):
            raise TypeError(
                f"expected {type(instance).__name__} to keep its argument {name}, because what it computes depends on"
                f" it: add self.{name} = {name}"
            )
        described[name] = _describe(getattr(instance, name))
    return described


def _describe(value: Any) -> Any:
    if hasattr(value, "identity"):
        return value.identity()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _describe(getattr(value, field.name)) for field in fields(value) if field.compare}
    return _plain(value)
