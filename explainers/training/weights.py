"""Saves and loads the weights of trained networks, with the identity of their target."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.training.state_dicts import State, check_alike


def save_network(network: nn.Module, path: Path, identity: Mapping[str, str]) -> Path:
    """Write the weights of a network to a safetensors file; returns its path.

    Args:
        network: the network whose weights are written.
        path: the file to write.
        identity: metadata of the file: the names and hashes of the target that the weights belong to.
    """
    return save_state(network.state_dict(), path, identity)


def save_state(state: State, path: Path, identity: Mapping[str, str]) -> Path:
    """Write a state dict to a safetensors file; returns its path.

    Args:
        state: the weights.
        path: the file to write.
        identity: metadata of the file, see `save_network`.
    """
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(on_cpu, path, metadata=dict(identity))
    return path


def read_network(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the identity and the weights from a file that `save_network` or `save_state` wrote.

    Raises:
        InputError: if the file does not exist, or is not a safetensors file.
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

    Args:
        network: the network, which is changed in place.
        weights: a state dict with the names and shapes of the network.
        path: the file that the weights were read from, for the message.

    Raises:
        InputError: if names or shapes differ; the message names `path` and the first weight that differs.
    """
    check_alike(network.state_dict(), weights, str(path))
    network.load_state_dict(weights)


def check_identity(saved: Mapping[str, str], own: Mapping[str, str], path: str, wanted: Mapping[str, str]) -> None:
    """Compare the identity in a file with the identity of the module that loads it.

    Args:
        saved: the identity in the file.
        own: the identity of the module.
        path: the file, for the message.
        wanted: each key that must be equal → the words before its value in the message.

    Raises:
        InputError: if a value differs; the message contains both values of the first key that differs.
    """
    for key, description in wanted.items():
        if saved.get(key) != own[key]:
            raise InputError(
                f"{path} explains {saved.get('backbone')} with {description} {saved.get(key)}; "
                f"this target, {own['backbone']}, has {own[key]}"
            )
