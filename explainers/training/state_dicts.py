"""Parts of state dicts, which let a checkpoint hold the trained weights without the frozen ones."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from explainers.errors import InputError
from explainers.saved.weights import check_floating

State = Mapping[str, Tensor]


def part(state: State, name: str) -> dict[str, Tensor]:
    """Return the entries of the submodule `name`, without the prefix `name.` of their keys.

    >>> part({"head.weight": 1, "backbone.weight": 2}, "head")
    {'weight': 1}
    """
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def without_part(state: State, name: str) -> dict[str, Tensor]:
    """Return the state dict without the entries of the submodule `name`.

    >>> without_part({"head.weight": 1, "backbone.weight": 2}, "head")
    {'backbone.weight': 2}
    """
    return {key: value for key, value in state.items() if not key.startswith(f"{name}.")}


def with_part(state: State, name: str, module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with the weights of `module` added as the submodule `name`; reverses `without_part`.

    >>> list(with_part({"backbone.weight": 2}, "head", nn.Linear(2, 1)))
    ['backbone.weight', 'head.weight', 'head.bias']
    """
    return dict(state) | {f"{name}.{key}": value for key, value in module.state_dict().items()}


def check_alike(first: State, second: State, where: str = "") -> None:
    """Compare the names and shapes of two state dicts.

    Args:
        first: a state dict.
        second: the state dict to compare with it.
        where: name of the file that one of them comes from, for the message.

    Raises:
        InputError: if they differ; the message names the first weight that differs.
    """
    for name in [*first, *second]:
        shapes = [tuple(state[name].shape) if name in state else None for state in (first, second)]
        if shapes[0] != shapes[1]:
            both = " and ".join("nothing" if shape is None else str(list(shape)) for shape in shapes)
            raise InputError(
                f"{where}{': ' if where else ''}expected weights of one architecture, got {both} for {name}: take"
                " models of one kind"
            )


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
    check_floating({name: str(weight.dtype) for name, weight in weights.items()}, path)
    network.load_state_dict(weights)
