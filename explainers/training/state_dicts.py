"""State dicts and their parts: a checkpoint holds what was trained, and leaves out what was frozen."""

from collections.abc import Mapping

from torch import Tensor, nn

from explainers.errors import InputError

State = Mapping[str, Tensor]


def part(state: State, name: str) -> dict[str, Tensor]:
    """The state of the submodule `name` alone, under the names that it has there.

    >>> part({"head.weight": 1, "backbone.weight": 2}, "head")
    {'weight': 1}
    """
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def without_part(state: State, name: str) -> dict[str, Tensor]:
    """A state dict without that of the submodule `name`.

    >>> without_part({"head.weight": 1, "backbone.weight": 2}, "head")
    {'backbone.weight': 2}
    """
    return {key: value for key, value in state.items() if not key.startswith(f"{name}.")}


def with_part(state: State, name: str, module: nn.Module) -> dict[str, Tensor]:
    """The inverse of `without_part`: a state dict with that of `module` as the submodule `name`."""
    return dict(state) | {f"{name}.{key}": value for key, value in module.state_dict().items()}


def check_alike(first: State, second: State, where: str = "") -> None:
    """Compare the names and shapes of two state dicts.

    Args:
        first: one of them.
        second: the other one.
        where: the file that one of them comes from, for the message.

    Raises:
        InputError: if they differ; it names the first weight that does.
    """
    for name in [*first, *second]:
        shapes = [tuple(state[name].shape) if name in state else None for state in (first, second)]
        if shapes[0] != shapes[1]:
            said = " and ".join("nothing" if shape is None else str(list(shape)) for shape in shapes)
            raise InputError(
                f"{where}{': ' if where else ''}expected weights of one architecture, got {said} for {name}: take"
                " models of one kind"
            )
