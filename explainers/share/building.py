"""Builds the arguments of an explainer from the config of its run.

A config from elsewhere is data. `check_arguments` accepts what `PERMITTED` names, the networks that the explainer's
class names, numbers, words, lists of them, and files of weights that hold no programs.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import timm

from explainers.errors import InputError
from explainers.models.fetching import create_model

PERMITTED: Mapping[str, tuple[str, ...]] = {
    "grid": ("explainers.masking.PatchGrid",),
    "target": ("explainers.models.TargetModel",),
    "model": ("timm.create_model",),
    "embed_layer": ("timm.layers.HybridEmbed",),
    "backbone": ("timm.create_model",),  # of a HybridEmbed
}
"""Argument → the only names that a config may give there; these names are refused for other arguments."""

PARTIAL = ("network", "embed_layer")
"""Arguments that are built as functions; the object that receives one calls it with further arguments."""

WEIGHTS = ("head", "checkpoint_path", "file", "surrogate")
"""Arguments that are paths of weights."""

OF_TIMM = inspect.signature(timm.create_model).parameters.keys() - {"kwargs"}
HARMLESS_OF_TIMM = {"model_name", "pretrained", "pretrained_cfg_overlay", "checkpoint_path"}
"""Arguments of `timm.create_model` itself, and those that a config may set; all others go to the model."""


Permitted = Mapping[str, tuple[str, ...]]


def build(settings: Any) -> Any:
    """Build what resolved settings name as `_target_`, and what their arguments name.

    Args:
        settings: nested dictionaries and lists; with `_partial_`, a function that is still to be called is built.
    """
    if isinstance(settings, list):
        return [build(each) for each in settings]
    if not isinstance(settings, dict):
        return settings
    arguments = {name: build(value) for name, value in settings.items() if name not in ("_target_", "_partial_")}
    if "_target_" not in settings:
        return arguments
    kind = imported(settings["_target_"])
    kind = create_model if kind is timm.create_model else kind  # weights in the cache need no connection
    return partial(kind, **arguments) if settings.get("_partial_") else kind(**arguments)


def imported(name: Any) -> Any:
    """Import the object with this dotted name."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"expected something to build, got {name}: {error}") from error


def check_arguments(settings: Mapping[str, Any], networks: Sequence[type]) -> None:
    """Raise an InputError unless a config from elsewhere may build these arguments of an explainer; builds nothing.

    Args:
        settings: the arguments.
        networks: classes that may be named as `network`.
    """
    names = tuple(f"{'.'.join(kind.__module__.split('.')[:2])}.{kind.__name__}" for kind in networks)  # of their room
    for name, value in settings.items():
        _check_argument(name, value, f"explainer.{name}", set(), {**PERMITTED, "network": names})


def check_permitted(settings: Any, argument: str, key: str, permitted: Permitted = PERMITTED) -> None:
    """Raise an InputError unless a config from elsewhere may build these settings; builds and imports nothing.

    Args:
        settings: what the config says for one argument.
        argument: name of the argument.
        key: dotted key of the settings, for the message.
        permitted: see `PERMITTED`.

    >>> check_permitted({"_target_": "os.system", "command": "ls"}, "grid", "explainer.grid")
    Traceback (most recent call last):
    explainers.errors.InputError: expected explainers.masking.PatchGrid for explainer.grid, got 'os.system': a config \
from elsewhere may not name it; trust_config=True builds it anyway, if you trust its author
    """
    named = settings.get("_target_") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or named not in permitted[argument]:
        raise refused(key, " or ".join(permitted[argument]) or "nothing", named)
    if settings.get("_partial_", False) is not (argument in PARTIAL):
        raise refused(f"{key}._partial_", str(argument in PARTIAL).lower(), settings.get("_partial_", False))
    forbidden = OF_TIMM - HARMLESS_OF_TIMM if named.startswith("timm.") else set()
    for name, value in settings.items():
        if name not in ("_target_", "_partial_"):
            _check_argument(name, value, f"{key}.{name}", forbidden, permitted)


def _check_argument(name: Any, value: Any, key: str, forbidden: set[str], permitted: Permitted) -> None:
    """Check one argument of what is built."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z]\w*", name) or name in forbidden:
        raise refused(key, "arguments that cannot name programs", name)
    if name == "pretrained_cfg_overlay" and isinstance(value, dict) and value.keys() <= {"file"}:
        _check_plain("file", value.get("file"), f"{key}.file")
    elif isinstance(value, dict):
        if name not in permitted:
            raise refused(key, "a number, a word or a list of them", value.get("_target_", value))
        check_permitted(value, name, key, permitted)
    else:
        _check_plain(name, value, key)


def _check_plain(name: str, value: Any, key: str) -> None:
    """Check an argument that is not built: numbers, words, lists of them, or the path of a file of weights."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            _check_plain(name, each, f"{key}.{number}")
    elif name in WEIGHTS and isinstance(value, str):
        if value and not value.endswith(".safetensors"):
            raise refused(key, "a .safetensors file, because other files of weights can hold programs", value)
    elif isinstance(value, str):
        if not re.fullmatch(r"[\w.-]*", value):
            raise refused(key, "a word", value)
    elif value is not None and not isinstance(value, bool | int | float):
        named = value.get("_target_", value) if isinstance(value, dict) else value
        raise refused(key, "a number, a word or a list of them", named)


def refused(key: str, expected: str, got: Any) -> InputError:
    """The error for settings that a config from elsewhere may not have."""
    shown = repr(got)  # which escapes line breaks and control characters
    return InputError(
        f"expected {expected} for {ascii(key)[1:-1][:80]}, got {shown[:80]}{'...' * (len(shown) > 80)}: a config from"
        " elsewhere may not name it; trust_config=True builds it anyway, if you trust its author"
    )
