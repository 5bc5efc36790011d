"""The line that a user reads for a mistake: in a command, in a config, or on a disk."""

import difflib
import errno
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException, MissingConfigException
from hydra.errors import OverrideParseException as ParseException
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
