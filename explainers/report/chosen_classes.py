"""Classes that a user names."""

import difflib
from collections.abc import Sequence

from explainers.errors import InputError, check_distinct


def class_indices(chosen: Sequence[int | str], names: Sequence[str]) -> list[int]:
    """Find classes by their names, in capital or small letters, or by their indices.

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
    by_name = {name.lower(): index for index, name in enumerate(names)}
    indices = [_index(one, by_name, names) for one in chosen]
    check_distinct(**{"pictures.classes": [names[index] for index in indices]})
    return indices


def _index(one: int | str, by_name: dict[str, int], names: Sequence[str]) -> int:
    if isinstance(one, int):
        if 0 <= one < len(names):
            return one
        raise InputError(f"expected pictures.classes from 0 to {len(names) - 1}, or names of classes, got {one}")
    wanted = one.lower()
    if wanted in by_name:
        return by_name[wanted]
    containing = [name for name in by_name if wanted in name]
    close = list(dict.fromkeys([*difflib.get_close_matches(wanted, by_name, 3), *containing]))[:5]
    hint = f"did you mean {', '.join(names[by_name[name]] for name in close)}?" if close else "name it by its index"
    raise InputError(f"expected pictures.classes among the {len(names)} classes of the model, got {one}: {hint}")
