"""The exception class for errors that the user can fix, and checks of arguments that raise it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")


class InputError(ValueError):
    """Bad input. The message is one line that says what was expected, what came, and what to do.

    The entry points print the message without a traceback. Every other exception is a bug of this project or of a
    library, and is printed with its traceback.
    """


def check_positive(**numbers: float) -> None:
    """Raise an InputError that names the first of these settings that is not above 0.

    >>> check_positive(masks=4000, cells=7)
    """
    for name, number in numbers.items():
        if not number > 0:
            raise InputError(f"expected {name} above 0, got {name}={number}")


def checks_choices(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function or a constructor: it raises an InputError for a choice that does not exist.

    A choice is an argument that is annotated with a `Literal` or with a sequence of one.

    >>> @checks_choices
    ... def mean(values: list[float], kind: Literal["arithmetic", "geometric"] = "arithmetic") -> float: ...
    >>> mean([1.0], kind="harmonic")
    Traceback (most recent call last):
    explainers.errors.InputError: expected kind arithmetic or geometric, got harmonic
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = get_type_hints(function)  # not before the first call: they may name classes that follow the function
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            _check_choice(name, value, hints.get(name))
        return function(*args, **kwargs)

    return checked


def _check_choice(name: str, value: Any, hint: Any) -> None:
    """Raise an InputError if the hint is a `Literal`, or a sequence of one, that does not allow the value."""
    several = get_origin(hint) not in (None, Literal) and len(get_args(hint)) == 1
    hint = get_args(hint)[0] if several else hint
    if get_origin(hint) is not Literal:
        return
    *choices, last = map(str, get_args(hint))
    for chosen in value if several and not isinstance(value, str) else [value]:
        if chosen not in get_args(hint):
            raise InputError(f"expected {name} {', '.join(choices)} or {last}, got {chosen}")
