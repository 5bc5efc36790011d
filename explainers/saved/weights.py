"""Saves and reads weights together with the identity of the model or explainer they belong to."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from explainers.errors import InputError
from explainers.saved.files import atomic
from explainers.saved.identity import Identity
from explainers.saved.records import first_difference


def save_weights(weights: Mapping[str, Tensor], path: Path, identity: Mapping[str, Any] | None = None) -> Path:
    """Write weights as `save_tensors` does; raises an InputError if one is not finite."""
    check_finite(weights, path)
    return save_tensors(weights, path, identity)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, identity: Mapping[str, Any] | None = None) -> Path:
    """Write tensors to a safetensors file, whole or not at all, and return its path.

    Equal tensors and identities give equal files.

    Args:
        tensors: name → tensor.
        path: the file to write.
        identity: identity of the model or explainer, see `identity`; `None` stores none.
    """
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    # A single entry, because safetensors writes several entries in random order
    metadata = None if identity is None else {"identity": json.dumps(identity)}
    with atomic(path) as unfinished:
        save_file(on_cpu, unfinished, metadata)
    return path


MAX_HEADER = 2**20
"""Size of the largest header that `read_header` reads, in bytes; headers of this project have a hundredth of it."""


def read_header(path: str | Path, expected: str = "a trained explainer") -> Identity:
    """Read the identity in a file as `read_tensors` does, and no tensor.

    Raises:
        InputError: if the file does not exist, is not a safetensors file, or has a header of more than `MAX_HEADER`.
    """
    with _opened(path, expected, MAX_HEADER) as file:
        return _identity(file)


def check_shapes(path: str | Path, wanted: Mapping[str, Tensor]) -> None:
    """Raise an InputError unless a file has tensors of these names and shapes; reads no tensor."""
    with _opened(path, "a trained explainer") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name in [*wanted, *shapes]:
        own = tuple(wanted[name].shape) if name in wanted else None
        if shapes.get(name) != own:
            raise InputError(
                f"expected {own or 'nothing'} for {ascii(name)[1:-1][:80]} in {path}, got"
                f" {shapes.get(name, 'nothing')}: its weights do not fit its settings; give another file"
            )


def read_weights(path: str | Path, expected: str = "a trained explainer") -> tuple[Identity, dict[str, Tensor]]:
    """Read identity and weights as `read_tensors` does; raises an InputError if a weight is not finite, too."""
    identity, weights = read_tensors(path, expected)
    check_finite(weights, path)
    return identity, weights


def check_finite(weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Raise an InputError for weights that are not finite; `source` is where they come from or go to.

    >>> import torch
    >>> check_finite({"bias": torch.tensor([0.0, torch.nan])}, "head.safetensors")
    Traceback (most recent call last):
    explainers.errors.InputError: head.safetensors: expected finite weights, got NaN or infinity in bias, as a training\
 that diverged leaves them: train again, or take another file
    """
    name = first_not_finite(weights)
    if name is not None:
        raise InputError(
            f"{source}: expected finite weights, got NaN or infinity in {name}, as a training that diverged leaves"
            " them: train again, or take another file"
        )


def first_not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a number that is not finite; `None` if there is none."""
    return next((name for name, value in weights.items() if not value.isfinite().all()), None)


def read_tensors(path: str | Path, expected: str = "a trained explainer") -> tuple[Identity, dict[str, Tensor]]:
    """Read the identity and the tensors from a file that `save_tensors` wrote; a missing identity is empty.

    Args:
        path: the file to read.
        expected: what the file should hold, for messages, with its article.

    Raises:
        InputError: if the file does not exist, or is not a safetensors file.
    """
    with _opened(path, expected) as file:
        return _identity(file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _opened(path: str | Path, expected: str, largest: int | None = None) -> Iterator[Any]:
    """Open a safetensors file; whatever is wrong with it is an InputError."""
    if not Path(path).is_file():
        raise InputError(f"no {expected.removeprefix('a ')} at {path}: train one with train.py, or give another path")
    try:
        with open(path, "rb") as start:
            length = int.from_bytes(start.read(8), "little")
        if largest is not None and length > largest:
            raise ValueError("a long header")
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"expected {expected} at {path}, got a damaged file: delete it, or write it again") from error


def _identity(file: Any) -> Identity:
    identity = json.loads((file.metadata() or {}).get("identity", "{}"))
    if not isinstance(identity, dict):
        raise ValueError("an identity is a dictionary")
    return identity


def check_floating(kinds: Mapping[str, str], path: str | Path) -> None:
    """Raise an InputError for weights that PyTorch would convert without a word: integers, booleans, complex numbers.

    Args:
        kinds: name of each tensor → its type, such as `torch.int8`, or `I8` as safetensors has it.
        path: the file of the tensors.
    """
    for name, kind in kinds.items():
        if name.rpartition(".")[2] in ("weight", "bias") and "f" not in kind.lower():
            raise InputError(
                f"expected floating-point weights in {path}, got {kind.removeprefix('torch.')} for {name}: give the"
                " weights before they were quantised or converted"
            )


def name_difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Describe the first entry of `own` that another identity has otherwise, with short hashes; `None` if all agree."""
    difference = first_difference({key: saved.get(key) for key in own}, dict(own))
    return difference and re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", difference)


def check_identity(saved: Mapping[str, Any], own: Mapping[str, Any], path: str | Path) -> None:
    """Raise an InputError unless the identity `saved` in a file has all entries of the object that loads the file."""
    difference = name_difference(saved, own)
    if difference is not None:
        raise InputError(
            f"expected {path} to be trained for the model and the settings of this run, got a difference in"
            f" {difference}: use the model and settings of the file, or train again"
        )
