"""One line for what a user got wrong: a command, a config, or what a disk allows."""

import difflib
import errno
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, InstantiationException, MissingConfigException
from hydra.errors import OverrideParseException as ParseException
from hydra.types import RunMode
from hydra.utils import get_object
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from safetensors import SafetensorError

from explainers.errors import InputError

FULL = "make room on its disk, or write to another one"
DENIED = "change its permissions, or take another path"
OF_THE_DISK = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), DENIED),
}
"""Error number of the operating system → what a user can do."""

TRACEBACK = "HYDRA_FULL_ERROR"
"""Environment variable with which a user asks for tracebacks: 1."""

COMPOSING = "EXPLAINERS_COMPOSING"
"""Environment variable that says that `start` has set `TRACEBACK`; jobs that SLURM starts later inherit both."""

MISTAKES = (InputError, InstantiationException, MisconfigurationException, OmegaConfBaseException, OSError)


def start(program: Callable[[], Any], configs: Path) -> None:
    """Run a program of `hydra.main`; mistakes in its command end it with one line, before anything else is done.

    Args:
        program: the decorated function.
        configs: folder of the config files.
    """
    if os.environ.get(TRACEBACK) == "1" and COMPOSING not in os.environ:
        program()
        return
    os.environ[TRACEBACK] = os.environ[COMPOSING] = "1"  # Hydra raises its errors then, instead of printing them
    try:
        check_program(sys.argv, configs)
        program()
    except (InputError, ConfigCompositionException, ParseException) as error:
        sys.exit(f"error: {of_the_command(error, configs)}")
    except ValueError as error:  # of a group, in Hydra's list of defaults
        if "Config group override must be" not in str(error):
            raise
        groups = {path.name for path in configs.iterdir() if path.is_dir()}
        named = [word for word in sys.argv if re.fullmatch(rf"({'|'.join(groups)})=(null|None)?", word)]
        sys.exit(
            f"error: expected a file for a group, got {' '.join(named)}: leave the group out with ~, as in ~callbacks"
        )


def check_program(command: list[str], configs: Path) -> None:
    """Raise an InputError if the command names an experiment of another program."""
    own = Path(command[0]).name
    for name in (word.partition("=")[2] for word in command[1:] if word.startswith("experiment=")):
        path = configs / "experiment" / f"{name}.yaml"
        found = re.search(r"^# Command: python (\S+\.py)", path.read_text(), re.MULTILINE) if path.is_file() else None
        if found and own != found[1]:
            raise InputError(
                f"expected an experiment of {own}, got {name}, one of {found[1]}: python {found[1]} experiment={name}"
            )


def of_the_command(error: Exception, configs: Path) -> str:
    """The line for an error in composing a config.

    Args:
        error: what Hydra raised.
        configs: folder of the config files.
    """
    text = " ".join(str(error).split())
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        names = sorted(path.stem for path in (configs / group).glob("*.yaml"))
        return f"no {group or 'config'} named {name}: {meant(name, names)}"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        return _unknown_key(cause, configs)
    unknown = re.search(r"Could not \w+ '([^']+)'\. (?:No match in|Did you mean to override ([^?]+))", text)
    if unknown and unknown[2]:
        return f"no group {unknown[1]} in the config of this program: did you mean {unknown[2]}?"
    if unknown:
        groups = sorted(path.name for path in configs.iterdir() if path.is_dir() and path.name != unknown[1])
        return f"no group {unknown[1]} in the config of this program: {meant(unknown[1], groups)}"
    if isinstance(error, ParseException):
        return f"cannot read {error.override!r}: {text.partition(' See https')[0]}: write key=value, or quote it"
    return text


def _unknown_key(cause: Any, configs: Path) -> str:
    """The line for a key that is not in the config: whose it is, or the nearest ones that are."""
    parent, key = str(cause.parent_node._get_full_key(None) or ""), str(cause.key)
    full = f"{parent}.{key}".lstrip(".")
    if parent in ("explainers", "tasks"):
        return f"no setting {full}: add {key} to {parent}=[...], which has {', '.join(cause.parent_node) or 'none'}"
    owners = [f"{path.stem}.py" for path in configs.glob("*.yaml") if full in _keys(OmegaConf.load(path))]
    if owners:
        return f"no setting {full}: it is one of {owners[0]}"
    siblings = [f"{parent}.{name}".lstrip(".") for name in map(str, cause.parent_node)]
    everywhere = [name for name in _keys(cause.parent_node._get_root()) if name.rpartition(".")[2] == key]
    return f"no setting {full}: {meant(full, siblings, everywhere)}"


def _keys(node: Any, path: str = "") -> Iterator[str]:
    """The dotted keys of a config."""
    names = node if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation() else ()
    for name in map(str, names):
        yield f"{path}.{name}".lstrip(".")
        yield from _keys(node._get_node(name), f"{path}.{name}")


def meant(name: str, known: Collection[str], others: Collection[str] = ()) -> str:
    """Ask for the nearest names, or list them all.

    >>> meant("trainer.max_epoch", ["trainer.max_epochs", "trainer.devices"])
    'did you mean trainer.max_epochs?'
    >>> meant("classes", ["seed", "fit"], ["evaluation.classes"])
    'did you mean evaluation.classes?'
    >>> meant("x", ["seed", "fit"])
    'there are seed, fit'
    """
    near, far = (difflib.get_close_matches(name, known, 3, likeness) for likeness in (0.7, 0.5))
    close = near or list(others)[:3] or far
    return f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known) or 'none'}"


def check_types(node: Any, **own: type) -> None:
    """Raise an InputError for the first setting of another type than the argument of its `_target_` has.

    Only numbers, texts, truth values and lists of them are compared.

    Args:
        node: a config, or a part of one.
        own: name → type of settings that the program itself reads from it.

    >>> check_types(DictConfig({"data": {"_target_": "datamodules.digits.DigitImages", "batch_size": "eight"}}))
    Traceback (most recent call last):
    explainers.errors.InputError: expected data.batch_size of type int, got 'eight'
    """
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    hints, defaults = _arguments(str(node._target_)) if "_target_" in node else (own, {})
    for name, hint in hints.items():
        if name not in node or OmegaConf.is_missing(node, name) or isinstance(node[name], DictConfig):
            continue
        value = OmegaConf.to_container(node[name]) if OmegaConf.is_list(node[name]) else node[name]
        if not _fits(value, hint) and (value is not None or defaults.get(name, value) is not None):
            kind = hint.__name__ if isinstance(hint, type) else re.sub(r"(\w+\.)+", "", str(hint))
            kind = kind.replace("Sequence[", "list[").replace("None", "null")
            raise InputError(f"expected {node._get_full_key(name)} of type {kind}, got {value!r}")
    for part in map(node._get_node, node):
        check_types(part)


@cache
def _arguments(target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Type hints and default values of the arguments of what a `_target_` names; none where they cannot be read."""
    try:
        found: Any = get_object(target)
        function = found.__init__ if isinstance(found, type) else found  # type: ignore[misc]
        signature = inspect.signature(function)
        hints = get_type_hints(function)
    except (ImportError, NameError, TypeError, ValueError, HydraException):
        return {}, {}  # building it tells why
    return (
        {name: hint for name, hint in hints.items() if name in signature.parameters},
        {name: parameter.default for name, parameter in signature.parameters.items()},
    )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a config is of a type; True for a type that is not compared.

    >>> _fits(3, int | None), _fits(3, float), _fits(True, int), _fits([1, "a"], Sequence[int]), _fits("x", Path)
    (True, True, False, False, True)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin in (list, Sequence):
        chosen = get_origin(inner[0]) is Literal  # compared by `checks_choices`, which lists them
        return chosen or (isinstance(value, list) and all(_fits(item, inner[0]) for item in value))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (bool, str, type(None)) else True


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exit with a one-line message if the user can correct the error; HYDRA_FULL_ERROR=1 shows its traceback.

    Such errors are `InputError`s, config keys that are misspelt or missing, values that a constructor refuses, full
    disks and missing permissions. All other errors keep their traceback, and so does every error of a sweep's job.
    """
    if os.environ.pop(COMPOSING, None):
        os.environ.pop(TRACEBACK, None)
    try:
        yield
    except (*MISTAKES, SafetensorError) as error:
        message = of_the_run(error)
        if message is None or os.environ.get(TRACEBACK) == "1" or HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        sys.exit(f"error: {' '.join(message.split())}")


def of_the_run(error: BaseException) -> str | None:
    """Message for an error that the user can correct; None for a bug."""
    cause = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, InputError):
        return str(cause).rpartition(f"{type(cause).__name__}: ")[2]  # a loader process prepends its traceback
    if isinstance(cause, OSError | SafetensorError):
        return _of_the_disk(cause)
    if isinstance(error, InstantiationException):  # Hydra would print it in three lines, without a traceback as well
        text = re.sub(r"full_key: (\S+)", r"(its settings are \1; HYDRA_FULL_ERROR=1 shows where)", str(error))
        return re.sub(r"""(\w+)\((["'])(.*)\2\)""", r"\1: \3", text, flags=re.DOTALL)
    missing = isinstance(cause, MissingMandatoryValue | MisconfigurationException | OmegaConfBaseException)
    return str(error) if missing else None


def _of_the_disk(error: OSError | SafetensorError) -> str | None:
    """Message for a full disk or a missing permission; None for other errors."""
    number = re.search(r"\(os error (\d+)\)", str(error))  # safetensors has it in its text alone
    code = int(number[1]) if number else getattr(error, "errno", None)
    if code not in OF_THE_DISK:
        return None
    path = getattr(error, "filename", None) or f"a file in {HydraConfig.get().runtime.output_dir}"
    return f"cannot read or write {path}: {os.strerror(code)}: {OF_THE_DISK[code]}"  # an open file tells no name
