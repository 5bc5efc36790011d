"""Parts of state dicts, and checks before weights are loaded or computed with."""

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


def load_weights(network: nn.Module, weights: State, path: str | Path) -> None:
    """Load weights from the file `path` into a network.

    Raises:
        InputError: if names or shapes differ, or a weight is no floating-point number.
    """
    check_alike(network.state_dict(), weights, str(path))
    check_floating({name: str(weight.dtype) for name, weight in weights.items()}, path)
    network.float().load_state_dict(weights)  # layers may have been made in another default type
