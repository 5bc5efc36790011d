"""Files of tensors with a header, which says what they belong to; and what a complete file of some kind holds."""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from explainers.errors import InputError, fits
from explainers.saved.files import atomic
from explainers.saved.identity import Identity, first_difference

State = Mapping[str, Tensor]
"""A state dict: name → tensor."""


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
        try:
            save_file(on_cpu, unfinished, metadata)
        except SafetensorError as error:  # a full disk, for example
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(number and int(number[1]), str(error), str(path)) from error
    return path


MAX_HEADER = 2**20
"""Size of the largest header that `read_header` reads, in bytes; headers of this project have a hundredth of it."""

Keys = Mapping[str, Any]
"""What a header has to hold: key → one of `VALUES` or a fixed text, or several of these, such as `number|none`; or
`Keys`, for a dictionary."""

Forms = Mapping[str, str]
"""What a file has to hold: name of each tensor → its type and shape, such as `F16 3 D`.

Types are those of safetensors, or one of `KINDS`. Sizes with a name are above 0, and equal in all tensors. A tensor
whose name ends in `?` may be missing."""

KINDS = {"floats": ("F16", "BF16", "F32", "F64"), "integers": ("I64", "I32", "I16", "I8", "U8", "BOOL")}


def is_finite(value: Any) -> bool:
    """Whether a value is a number, and finite as a float.

    >>> is_finite(0.5), is_finite(float("nan")), is_finite(10**400), is_finite(True)
    (True, False, False, False)
    """
    return fits(value, float) and abs(value) <= sys.float_info.max


VALUES: dict[str, Callable[[Any], bool]] = {
    "dictionary": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list),
    "text": lambda value: isinstance(value, str),
    "texts": lambda value: fits(value, Sequence[str]),
    "number": is_finite,
    "positive number": lambda value: is_finite(value) and value > 0,
    "numbers": lambda value: isinstance(value, list) and all(map(is_finite, value)),
    "boolean": lambda value: isinstance(value, bool),
    "none": lambda value: value is None,
    "SHA-256": lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)),
}


def read_header(path: str | Path, expected: str = "a trained explainer", keys: Keys | None = None) -> Identity:
    """Read the identity in a file, and no tensor; a missing identity is empty.

    Args:
        path: the file to read.
        expected: what the file should hold, for messages, with its article.
        keys: what the identity has to hold.

    Raises:
        InputError: if the file does not exist, is not a safetensors file, has a header of more than `MAX_HEADER`, or
            one without these keys.
    """
    with _opened(path, expected, MAX_HEADER) as file:
        identity = _identity(file)
    check_keys(identity, keys or {}, path)
    return identity


def read_weights(
    path: str | Path, expected: str = "a trained explainer", keys: Keys | None = None
) -> tuple[Identity, dict[str, Tensor]]:
    """Read the identity and the tensors in a file, see `read_header`; an InputError if a number is not finite, too."""
    identity, weights = read_tensors(path, expected)
    check_finite(weights, path)
    check_keys(identity, keys or {}, path)
    return identity, weights


def read_tensors(path: str | Path, expected: str = "a trained explainer") -> tuple[Identity, dict[str, Tensor]]:
    """Read the identity and the tensors in a file, whatever they are; see `read_weights`."""
    with _opened(path, expected) as file:
        return _identity(file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def check_keys(header: Mapping[str, Any], keys: Keys, path: str | Path, prefix: str = "") -> None:
    """Raise an InputError unless a header, or a part of it below a `prefix`, has these keys."""
    for name, wanted in keys.items():
        value, kinds = header.get(name), ["dictionary"] if isinstance(wanted, Mapping) else wanted.split("|")
        if not any(VALUES[kind](value) if kind in VALUES else value == kind for kind in kinds):
            expected = " or ".join(kinds)
            raise InputError(f"{path}: expected {expected} for {prefix}{name}, got {quote(value)}: give another file")
        if isinstance(wanted, Mapping):
            check_keys(header[name], wanted, path, f"{prefix}{name}.")


def describe_tensors(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, str]:
    """Describe the tensors of a state dict, whose names get a prefix, as `Forms`.

    >>> describe_tensors({"weight": torch.zeros(2, 3), "count": torch.tensor(1)}, "head.")
    {'head.weight': 'floats 2 3', 'head.count': 'integers'}
    """
    kinds = {name: "floats" if value.is_floating_point() else "integers" for name, value in state.items()}
    return {prefix + name: " ".join([kinds[name], *map(str, value.shape)]) for name, value in state.items()}


def check_forms(path: str | Path, forms: Forms) -> None:
    """Raise an InputError unless a file holds the tensors of these forms, and no others; reads no tensor."""
    with _opened(path, "weights") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {name: [part.get_dtype(), *map(str, part.get_shape())] for name, part in parts.items()}
    sizes: dict[str, str] = {}
    wanted = {name.removesuffix("?"): form.split() for name, form in forms.items()}
    for name in dict.fromkeys([*wanted, *found]):
        form, own = wanted.get(name, []), found.get(name, [])
        if not own and f"{name}?" in forms:
            continue
        for size, number in zip(form[1:], own[1:], strict=False):
            if not size.isdigit() and number != "0":
                sizes.setdefault(size, number)
        form = [sizes.get(size, size) for size in form]
        if own[1:] != form[1:] or not (own and form) or own[0] not in KINDS.get(form[0], form):
            needs, has = (f"{each[0]} of shape [{', '.join(each[1:])}]" if each else "nothing" for each in (form, own))
            raise InputError(f"{path}: expected {needs} for {quote(name)}, got {has}: give another file")


def seal(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of a header and of tensors, by which `read_sealed` tells whether a file was changed."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_sealed(path: str | Path, expected: str, advice: str) -> tuple[Identity, dict[str, Tensor]]:
    """Read the identity and the tensors in a file that has the `seal` of them as the identity's `sha256`.

    Raises:
        InputError: if the file does not exist, or is not as it was written; it ends in the `advice`.
    """
    identity, tensors = read_tensors(path, expected)
    if identity.pop("sha256", None) != seal(identity, tensors):
        raise InputError(f"{path}: expected {expected} as it was written, got a changed file: {advice}")
    return identity, tensors


def quote(value: Any) -> str:
    """The start of a value for a message; line breaks and control characters are escaped."""
    shown = ascii(value)
    return f"{shown[:80]}{'...' * (len(shown) > 80)}"


def check_finite(weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Raise an InputError for weights that are not finite; `source` is where they come from or go to.

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


@contextmanager
def _opened(path: str | Path, expected: str, largest: int | None = None) -> Iterator[Any]:
    """Open a safetensors file; whatever is wrong with it is an InputError."""
    if not Path(path).is_file():
        raise InputError(f"{path}: expected {expected}, got no file: train one with train.py, or give another path")
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
        raise InputError(f"{path}: expected {expected}, got a damaged file: delete it, or write it again") from error


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


def part(state: State, name: str) -> dict[str, Tensor]:
    """Return the entries of the submodule `name`, without the prefix `name.` of their keys.

    >>> part({"head.weight": 1, "backbone.weight": 2}, "head")
    {'weight': 1}
    """
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def check_alike(first: State, second: State, where: str = "") -> None:
    """Raise an InputError unless two state dicts have the same names and shapes; it names the first that differs.

    Args:
        first: a state dict.
        second: the state dict to compare with it.
        where: name of the file that one of them comes from, for the message.
    """
    for name in [*first, *second]:
        shapes = [tuple(state[name].shape) if name in state else None for state in (first, second)]
        if shapes[0] != shapes[1]:
            both = " and ".join("nothing" if shape is None else str(list(shape)) for shape in shapes)
            raise InputError(
                f"{where}{': ' if where else ''}expected weights of one architecture, got {both} for {name}: take"
                " models of one kind"
            )
