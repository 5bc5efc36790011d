"""The exception class for errors that the user can fix, and checks of arguments that raise it."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")

REPEATED = "a choice may be listed several times"
"""Annotation of a sequence whose entries may repeat: `Annotated[Sequence[...], REPEATED]`."""


class InputError(ValueError):
    """Bad input. The message is one line that says what was expected, what came, and what to do.

    The entry points print this message without a traceback. They print every other exception, which is a bug of this
    project or of a library, with its traceback.

    Args:
        text: the message. It names settings as arguments of Python, `image_size=448`.
        settings: the settings in it, the one to change first, which each front door writes in its own way.

    >>> error = InputError("images of 30 pixels: take image_size=(32, 48)", "image_size")
    >>> error.setting
    'image_size'
    >>> error.spell(lambda name, value: f"--image-size={value[1:-1].replace(', ', 'x')}")
    'images of 30 pixels: take --image-size=32x48'
    """

    def __init__(self, text: str, *settings: str) -> None:
        super().__init__(text, *settings)
        self.settings = settings
        self.setting = settings[0] if settings else ""

    def __str__(self) -> str:
        return str(self.args[0])

    def spell(self, write: Callable[[str, str], str]) -> str:
        """Write each setting as `write` does, given its name, and its value if that is `None` or `(32, 48)`."""
        text = str(self)
        for name in self.settings:
            # These values are handed over, because front doors write them in their own ways
            found = re.compile(rf"(?<![\w.-]){name}(?==)(?:=(None\b|\([^)]*\)))?|(?:^|(?<=: )){name}(?=: )")
            text = found.sub(lambda match, name=name: write(name, match[1] or ""), text)  # type: ignore[misc]
        return text


def check_keywords(function: str, given: Mapping[str, Any], known: type) -> None:
    """Raise Python's TypeError for a keyword argument that a `TypedDict` lacks."""
    if unknown := given.keys() - known.__annotations__:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


class UnsupportedModel(InputError):
    """A model lacks what a method needs.

    Args:
        wanted: what the method needs.
        got: the model, by its name.
        otherwise: what to take instead.

    >>> str(UnsupportedModel("a transformer", "ResNet", "RISE"))
    'expected a transformer, got ResNet: take RISE'
    """

    def __init__(self, wanted: str, got: str, otherwise: str) -> None:
        super().__init__(f"expected {wanted}, got {got}: take {otherwise}")
        self.wanted = wanted
        self.got = got
        self.otherwise = otherwise

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.wanted, self.got, self.otherwise)


def needs(package: str, extra: str, purpose: str = "") -> None:
    """Raise an InputError unless an optional package is installed. Call it where the package is imported.

    Args:
        package: its name in Python, such as `sklearn`.
        extra: the extra of this project that installs it.
        purpose: what needs it, such as `explainers serve`.

    >>> needs("no_such_package", "app", "explainers serve")
    Traceback (most recent call last):
    explainers.errors.InputError: expected no_such_package for explainers serve, got an installation without it: \
pip install 'transferable-explainers[app]'
    """
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        wanted = f"{package} for {purpose}" if purpose else package
        raise InputError(
            f"expected {wanted}, got an installation without it: pip install 'transferable-explainers[{extra}]'"
        ) from error


def suggest_names(name: str, known: Collection[str], others: Collection[str] = ()) -> str:
    """Suggest the most similar names, or list them all.

    >>> suggest_names("trainer.max_epoch", ["trainer.max_epochs", "trainer.devices"])
    'did you mean trainer.max_epochs?'
    >>> suggest_names("classes", ["seed", "fit"], ["evaluation.classes"])
    'did you mean evaluation.classes?'
    >>> suggest_names("x", ["seed", "fit"])
    'there are seed, fit'
    """
    similar, less_similar = (difflib.get_close_matches(name, known, 3, cutoff) for cutoff in (0.7, 0.5))
    suggested = similar or list(others)[:3] or less_similar
    return f"did you mean {', '.join(suggested)}?" if suggested else f"there are {', '.join(known) or 'none'}"


def check_integers(**numbers: Any) -> None:
    """Raise an InputError for the first setting that is not an integer.

    >>> check_integers(masks=4000)
    >>> check_integers(passes=64.0)
    Traceback (most recent call last):
    explainers.errors.InputError: expected passes as an integer, got passes=64.0
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise InputError(f"expected {name} as an integer, got {name}={number!r}", name)


def check_positive(**numbers: float) -> None:
    """Raise an InputError for the first setting that is not above 0.

    >>> check_positive(masks=4000, cells=7)
    """
    for name, number in numbers.items():
        if not (isinstance(number, Real) and number > 0):
            raise InputError(f"expected {name} above 0, got {name}={number}", name)


def check_range(low: float, high: float = float("inf"), /, **numbers: float) -> None:
    """Raise an InputError for the first setting that is not from `low` to `high`, both included.

    >>> check_range(0, hops=2)
    >>> check_range(1, 16, patches=20)
    Traceback (most recent call last):
    explainers.errors.InputError: expected patches from 1 to 16, got patches=20
    """
    allowed = f"of at least {low}" if high == float("inf") else f"from {low} to {high}"
    for name, number in numbers.items():
        if not (isinstance(number, Real) and low <= number <= high):
            raise InputError(f"expected {name} {allowed}, got {name}={number}", name)


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any], place: str = "") -> None:
    """Raise an InputError for the first value that does not have the type of its hint.

    Args:
        values: name of each setting → value.
        hints: name of each setting → type hint.
        place: what the message puts before the name.

    >>> check_types({"masks": 1.5}, {"masks": int | None})
    Traceback (most recent call last):
    explainers.errors.InputError: expected masks of type int | None, got 1.5
    """
    for name, value in values.items():
        hint = hints.get(name, Any)
        if not fits(value, hint):
            kind = hint.__name__ if isinstance(hint, type) else str(hint)
            raise InputError(f"expected {place}{name} of type {kind}, got {value!r}", f"{place}{name}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a hint: a number, a boolean, a text, none, a list, or one of several.

    True for other hints, and for lists of choices, which `checks_choices` compares.

    >>> fits(3, int | None), fits(3, float), fits(True, int), fits([1, "a"], Sequence[int]), fits("x", Mapping)
    (True, True, False, False, True)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin in (list, Sequence):
        chosen = get_origin(inner[0]) is Literal
        return chosen or (isinstance(value, list | tuple) and all(fits(item, inner[0]) for item in value))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (bool, str, type(None)) else True


def check_distinct(**lists: Sequence[Any]) -> None:
    """Raise an InputError for the first list with a repeated entry.

    >>> check_distinct(subsets=[16, 32])
    >>> check_distinct(subsets=[16, 32, 16])
    Traceback (most recent call last):
    explainers.errors.InputError: expected each of subsets once, got 16, 32, 16: leave out the second 16
    """
    for name, values in lists.items():
        repeated = [value for number, value in enumerate(values) if value in values[:number]]
        if repeated:
            listed = ", ".join(map(str, values))
            raise InputError(f"expected each of {name} once, got {listed}: leave out the second {repeated[0]}")


def checks_choices(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function or a constructor, so that it raises an InputError for a choice that does not exist.

    A choice is an argument annotated with a `Literal`, perhaps `| None`, or with a sequence of a `Literal`. The entries
    of a sequence must be distinct, unless the annotation has the mark `REPEATED`.

    >>> @checks_choices
    ... def mean(values: list[float], kind: Literal["arithmetic", "geometric"] = "arithmetic") -> float: ...
    >>> mean([1.0], kind="harmonic")
    Traceback (most recent call last):
    explainers.errors.InputError: expected kind arithmetic or geometric, got harmonic
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> Mapping[str, Any]:
        # Resolved at the first call, because hints may name classes that are defined after the function
        return get_type_hints(function, include_extras=True)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # wrong arguments, for which the function raises an error with its own name
            return function(*args, **kwargs)
        check_choices(given, hints())
        return function(*args, **kwargs)

    return checked


def check_choices(arguments: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise an InputError for the first argument that its hint, a `Literal` or a sequence of one, does not allow.

    Args:
        arguments: name of each argument → value.
        hints: name of each argument → type hint; other hints than choices are ignored.
    """
    for name, value in arguments.items():
        hint, repeated = hints.get(name), False
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
            repeated = REPEATED in marks
        if type(None) in get_args(hint):
            if value is None:
                continue
            hint = get_args(hint)[0]
        several = get_origin(hint) not in (None, Literal) and len(get_args(hint)) == 1
        hint = get_args(hint)[0] if several else hint
        if get_origin(hint) is not Literal:
            continue
        *choices, last = map(str, get_args(hint))
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if several != listed or any(chosen not in get_args(hint) for chosen in (value if listed else [value])):
            kind = "as a list of " if several else ""
            raise InputError(f"expected {name} {kind}{', '.join(choices)} or {last}, got {value}", name)
        if several and not repeated:
            check_distinct(**{name: value})
