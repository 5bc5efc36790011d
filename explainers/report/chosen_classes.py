"""Classes that a user names for pictures."""

from collections.abc import Sequence

from explainers.errors import InputError, check_distinct
from explainers.target.names import class_index


def class_indices(chosen: Sequence[int | str], names: Sequence[str]) -> list[int]:
    """Find classes by their names or indices, see `class_index`.

    Args:
        chosen: names or indices.
        names: the name of each class of the model.

    Raises:
        InputError: if a class does not exist, with the names most like it, or is named twice.

    >>> class_indices(["zebra", 0], ["African elephant", "Zebra"])
    [1, 0]
    """
    if not chosen:
        raise InputError("expected pictures.classes as a number, or as one or more classes, got none")
    indices = [class_index(one, names, "pictures.classes") for one in chosen]
    check_distinct(**{"pictures.classes": [names[index] for index in indices]})
    return indices
