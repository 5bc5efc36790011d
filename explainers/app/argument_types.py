"""What the words of a command line become: numbers, sizes, paths, and methods with options."""

import argparse
import ast
import os
import re
from pathlib import Path
from typing import Any

METHOD = "NAME or NAME(option=value, ...)"
"""How `--method` names a method."""


def parse_number(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text}")
    return int(text)


def parse_positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return int(text)


def parse_size(text: str) -> int | tuple[int, int]:
    """A number of pixels, or height and width with an x between them.

    >>> parse_size("448"), parse_size("224x448")
    (448, (224, 448))
    """
    sides = [parse_positive(side) for side in text.split("x")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"expected pixels, such as 448 or 224x448, got {text}")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def parse_white(text: str) -> float | tuple[float, float]:
    """The value of white, or those of black and white.

    >>> parse_white("4095"), parse_white("-1,1")
    (4095.0, (-1.0, 1.0))
    """
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if len(values) not in (1, 2):
        raise argparse.ArgumentTypeError(f"expected one number, or two, got {text}")
    return values[0] if len(values) == 1 else (values[0], values[1])


def parse_bands(text: str) -> list[int]:
    """Numbers of bands, such as 3,2,1."""
    return [parse_number(part.strip()) for part in text.split(",")]


def parse_path(text: str) -> Path:
    """A path, in which ~ is the user's folder; an unknown user's ~name stays as it is."""
    return Path(os.path.expanduser(text))


def parse_methods(text: str) -> list[Any]:
    """The names of methods, and a dictionary of one name and its options for a method with options, see `choose`.

    Raises:
        ArgumentTypeError: for a text of another form.

    >>> parse_methods("GAE, RISE(masks=100, cells=5)")
    ['GAE', {'RISE': {'masks': 100, 'cells': 5}}]
    >>> parse_methods("runs/anyhead_pets")
    ['runs/anyhead_pets']
    """
    entries = [entry.strip() for entry in re.split(r",(?![^(]*\))", text)]
    return [_parse_method(entry) for entry in entries if entry] or [_parse_method(text)]


def _parse_method(entry: str) -> Any:
    if "/" in entry:  # the folder of an explainer
        return entry
    found = re.fullmatch(r"([\w-]+)(?:\((.*)\))?", entry)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected {METHOD}, got {entry or 'no name'}")
    name, options = found.groups()
    if not options:
        return name
    pairs = [option.partition("=") for option in re.split(r",(?![^\[]*\])", options)]
    wrong = [option.strip() for option, equals, _ in pairs if not equals]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"expected {METHOD}, got {entry}, in which {wrong[0] or 'an option'} has no value"
        )
    return {name: {option.strip(): _parse_value(value.strip()) for option, _, value in pairs}}


def _parse_value(text: str) -> Any:
    """A number, true, false, none, a list of them, or the text itself.

    >>> [_parse_value(text) for text in ("100", "0.5", "true", "none", "[0, 6]", "log_odds")]
    [100, 0.5, True, None, [0, 6], 'log_odds']
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
