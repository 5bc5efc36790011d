"""Files of weights as trainings leave them, in which the names of tensors begin with that of what held the model."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from timm.models import load_state_dict
from torch import Tensor

from explainers.errors import InputError
from explainers.saved.weights import check_floating


def read_checkpoint(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights, .safetensors, or of PyTorch or Lightning; programs in it do not run.

    Raises:
        InputError: for a damaged file, one that holds programs, and weights that are no floating-point numbers.
    """
    try:
        found = load_state_dict(str(file))
        weights = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    except Exception as error:  # bytes that are no weights raise nearly any error
        raise InputError(
            f"expected weights in {file}, got a damaged file, or one that holds programs: write"
            " model.state_dict() again, as .safetensors"
        ) from error
    check_floating({name: str(value.dtype) for name, value in weights.items()}, file)
    return weights


def find_prefix(names: Iterable[str], wanted: Collection[str]) -> str | None:
    """Find the beginning of names below which more than half of the `wanted` names are; `None` if there is none.

    >>> find_prefix(["net.encoder.cls", "net.encoder.norm.bias", "loss.bias"], ["cls", "norm.bias"])
    'net.encoder.'
    """
    parts = ((name, start) for name in names for start in range(len(name)) if name[start - 1 : start] in ("", "."))
    count = Counter(name[:start] for name, start in parts if name[start:] in wanted)
    prefix, found = max(count.items(), key=lambda item: item[1], default=(None, 0))
    return prefix if found > len(wanted) / 2 else None


def strip_prefix(weights: Mapping[str, Tensor], wanted: Collection[str], file: Path) -> dict[str, Tensor]:
    """Take the prefix of `find_prefix` off the names of weights, and say it in one line; empty if nothing changes.

    Tensors that are no part of the model, such as those of a loss, are left out, which the line says, too.
    """
    prefix, parts = find_prefix(weights, wanted), {name.partition(".")[0] for name in wanted}
    if prefix is None:
        return {}
    below = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    below = {name: value for name, value in below.items() if name.partition(".")[0] in parts}
    others = [name for name in weights if name.removeprefix(prefix) not in below]
    if not prefix and (not others or not below.keys() >= set(wanted)):
        return {}
    left = f", without {', '.join(others[:3])}{', ...' * (len(others) > 3)}" * bool(others)
    print(f"{file}: {len(below)} weights{f' below {prefix}' * bool(prefix)}{left}", file=sys.stderr, flush=True)
    return below


def count_classes(weights: Mapping[str, Tensor], classifier: str | Iterable[str] | None) -> int:
    """The number of classes of weights, by their `classifier`, one layer or several; 0 without that layer."""
    layer = classifier if isinstance(classifier, str) else next(iter(classifier or ("head",)))
    weight = weights.get(f"{layer}.weight", torch.zeros(0))
    return weight.shape[0] if weight.dim() else 0
