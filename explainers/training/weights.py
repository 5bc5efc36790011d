"""Saves and loads trained networks with their target's identity."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.training.state_dicts import State, check_alike


def save_network(network: nn.Module, path: Path, identity: Mapping[str, str]) -> Path:
    """Write the weights of a network to a safetensors file, with `identity` as its metadata."""
    return save_state(network.state_dict(), path, identity)


def save_state(state: State, path: Path, identity: Mapping[str, str]) -> Path:
    """Write a state dict to a safetensors file, with `identity` as its metadata."""
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(on_cpu, path, metadata=dict(identity))
    return path


def read_network(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read what `save_network` wrote: the identity and the weights.

    Raises:
        InputError: if there is no file, or it is no safetensors file.
    """
    if not Path(path).is_file():
        raise InputError(f"no trained explainer at {path}: train one with train.py, or give another path")
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"expected a safetensors file of weights at {path}, got something else: {error}") from error


def load_weights(network: nn.Module, weights: State, path: str | Path) -> None:
    """Load weights into a network.

    Raises:
        InputError: if they belong to another network; it names `path` and the first weight that differs.
    """
    check_alike(network.state_dict(), weights, str(path))
    network.load_state_dict(weights)


def check_identity(saved: Mapping[str, str], own: Mapping[str, str], path: str, wanted: Mapping[str, str]) -> None:
    """Compare the identity in a file with that of the module which loads it.

    Args:
        saved: the identity in the file.
        own: the identity of the module.
        path: the file, for the message.
        wanted: key that has to be equal → the words that stand before its value in the message.

    Raises:
        InputError: if a value differs; it names the first key that does, with both values.
    """
    for key, what in wanted.items():
        if saved.get(key) != own[key]:
            raise InputError(
                f"{path} explains {saved.get('backbone')} with {what} {saved.get(key)}; "
                f"this target, {own['backbone']}, has {own[key]}"
            )
