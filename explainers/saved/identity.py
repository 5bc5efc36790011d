"""Identities: the weights, architectures and constructor arguments on which results, stored rows and weights depend.

An identity is a nested dictionary of names and JSON values. The programs reuse results, rows and weights only if the
identities are equal.
"""

import hashlib
import inspect
import io
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from timm.layers import DropPath, PatchDropout
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from explainers.runtime.sampling import uniform

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
    """A weight as a plain tensor, or the bytes of another object, such as the packed weights of a quantised layer."""
    if isinstance(value, Tensor) and not value.is_quantized and not is_traceable_wrapper_subclass(value):
        return value
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


ROUNDED = {"matrices": 0.004, "vectors": 0.05}
"""Largest difference between the weights of two copies of a model, relative to their size, that rounding explains.

bfloat16 moves matrices by 0.0023. Training moves them farther. Files of 8 bits round biases and norms coarsely."""


SUMS = 8  # of each weight in a sketch


SIZED = "pos_embed"
"""Name of the weights that depend on the size of the images."""


def sketch_weights(module: nn.Module, sized: bool = True) -> list[float]:
    """Compute a short sketch of a module's weights: eight sums of the entries of each, with fixed random signs.

    The squared differences between the sketches of two modules have the squared distance of their weights as
    expectation (Achlioptas, 2003). So a sketch tells a rounded copy from another model, which a hash does not.

    Args:
        module: the module.
        sized: False leaves out the weights that depend on the size of the images, here and in `measure_distances`.

    >>> layer = nn.Linear(64, 64)
    >>> sketch = sketch_weights(layer)
    >>> is_rounded_copy(layer.bfloat16(), sketch), is_rounded_copy(nn.Linear(64, 64), sketch)
    (True, False)
    """
    return [float(f"{each:.7g}") for weight in _floating(module, sized) for each in _signed_sums(weight).tolist()]


def is_rounded_copy(module: nn.Module, sketch: Any) -> bool:
    """Whether a module has the weights of a sketch up to rounding, see `ROUNDED`."""
    distances = measure_distances(module, sketch)
    return all(distances[kind] <= limit for kind, limit in ROUNDED.items())


def measure_distances(module: nn.Module, sketch: Any, sized: bool = True) -> dict[str, float]:
    """Estimate how far a module's matrices and vectors are from those of a sketch, relative to their own size.

    Matrices trained apart have no direction in common: at equal sizes, their distance is √2. Infinite for a sketch of
    other weights.
    """
    own = [(weight.dim() > 1, weight.square().sum(), _signed_sums(weight)) for weight in _floating(module, sized)]
    if not isinstance(sketch, list) or len(sketch) != SUMS * len(own):
        return dict.fromkeys(ROUNDED, math.inf)
    moved, size = dict.fromkeys(ROUNDED, 0.0), dict.fromkeys(ROUNDED, 1e-30)
    for number, (matrix, square, sums) in enumerate(own):
        kind = "matrices" if matrix else "vectors"
        moved[kind] += (sums - torch.tensor(sketch[SUMS * number :][:SUMS])).square().sum().item()
        size[kind] += square.item()
    return {kind: (moved[kind] / size[kind]) ** 0.5 for kind in ROUNDED}


def _floating(module: nn.Module, sized: bool = True) -> Iterator[Tensor]:
    """The parameters and statistics of a module with floating-point entries, in the order of their names."""
    state = sorted((_drop_compiled(name), _numbers(value)) for name, value in module.state_dict().items())
    used = (value for name, value in state if sized or not name.endswith(SIZED))
    return (value.detach().cpu().double() for value in used if value.is_floating_point())


def _signed_sums(weight: Tensor) -> Tensor:
    """The sums over every eighth entry with random signs, (8,)."""
    signs = 2.0 * (uniform(torch.arange(weight.numel()), 0) < 0.5) - 1
    return F.pad(weight.flatten() * signs, (0, -weight.numel() % SUMS)).view(-1, SUMS).sum(0)


LIBRARIES = ("torch.", "timm.", "transformers.", "lightning.", "wandb.", "accelerate.", "explainers.", "callbacks.")
"""Packages whose hooks and replaced methods change no outputs, or are told by weights or architecture."""


def is_added(function: Any) -> bool:
    """Whether a hook or a method was added to a module by a caller's program, and by no library."""
    function = function.func if isinstance(function, partial) else function
    return not f"{getattr(function, '__module__', '')}.".startswith(LIBRARIES)


def is_changed(part: nn.Module) -> bool:
    """Whether a module, without those inside of it, has forward hooks or a replaced method of a caller's program."""
    found = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    for name, value in vars(part).items():
        replaces = callable(value) and callable(getattr(type(part), name, None))
        found += [value] * (replaces and (name == "forward" or not hasattr(nn.Module, name)))
    if not is_added(type(part)):
        found.append(inspect.getattr_static(type(part), "forward"))
    return any(map(is_added, found))


def find_changes(module: nn.Module) -> list[str]:
    """Name the layers that are changed, see `is_changed`, which neither weights nor types of layers show."""
    return [name or type(module).__name__ for name, part in module.named_modules() if is_changed(part)]


def architecture_hash(module: nn.Module, sized: bool = True) -> str:
    """Compute the SHA-256 of a module's architecture: the names, types and settings of its submodules.

    Hooks and replaced methods belong to it, see `find_changes`.


    Settings are attributes with the name of a constructor argument, such as the number of heads, the epsilon of a
    normalisation or the size of a window. Dropout is ignored, because an explained model is in evaluation mode; and the
    size of the images, if not `sized`.

    >>> architecture_hash(nn.LayerNorm(2, eps=1e-5)) == architecture_hash(nn.LayerNorm(2, eps=1e-6))
    False
    """
    described = [
        (
            _drop_compiled(name),
            type(part).__name__,
            {key: _plain(value) for key, value in sorted(_settings(part).items()) if sized or key != "img_size"},
        )
        for name, part in module.named_modules()
        if not isinstance(part, INACTIVE) and not hasattr(part, "_orig_mod")
    ]
    described += [(name, "changed", {}) for name in find_changes(module)]
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


def first_difference(old: Any, new: Any, key: str = "") -> str | None:
    """Describe the first difference of two nested configs as `key: old → new`; None if they are equal.

    >>> first_difference({"seed": 0, "explainer": {"hops": [1]}}, {"seed": 0, "explainer": {"hops": [2]}})
    'explainer.hops: [1] → [2]'
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**new, **old}:
            difference = first_difference(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
            if difference:
                return difference
        return None
    return None if old == new else f"{key}: {_short(old)} → {_short(new)}"


def _short(value: Any) -> str:
    """Convert a value to text; a whole section, which one of the configs lacks, is cut to 80 characters."""
    text = str(value)
    return f"{text[:80]}..." if isinstance(value, dict) and len(text) > 80 else text
