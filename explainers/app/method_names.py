"""How the command names methods: by commas, with options in parentheses, as in `GAE,RISE(masks=100)`."""

import ast
import re
from argparse import ArgumentTypeError
from typing import Any

FORM = "NAME or NAME(option=value, ...)"


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
    return [_parsed(entry) for entry in entries if entry] or [_parsed(text)]


def _parsed(entry: str) -> Any:
    if "/" in entry:  # the folder of an explainer
        return entry
    found = re.fullmatch(r"([\w-]+)(?:\((.*)\))?", entry)
    if found is None:
        raise ArgumentTypeError(f"expected {FORM}, got {entry or 'no name'}")
    name, options = found.groups()
    if not options:
        return name
    pairs = [option.partition("=") for option in re.split(r",(?![^\[]*\])", options)]
    wrong = [option.strip() for option, equals, _ in pairs if not equals]
    if wrong:
        raise ArgumentTypeError(f"expected {FORM}, got {entry}, in which {wrong[0] or 'an option'} has no value")
    return {name: {option.strip(): _value(value.strip()) for option, _, value in pairs}}


def _value(text: str) -> Any:
    """A number, true, false, none, a list of them, or the text itself.

    >>> [_value(text) for text in ("100", "0.5", "true", "none", "[0, 6]", "log_odds")]
    [100, 0.5, True, None, [0, 6], 'log_odds']
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
