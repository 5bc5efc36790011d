"""The one line that a user reads after a mistake in a command or a config, or when a disk is full."""

import errno
import os
import re
from pathlib import Path

from huggingface_hub.errors import LocalEntryNotFoundError
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException, MissingConfigException
from hydra.errors import OverrideParseException as ParseException
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from safetensors import SafetensorError

from explainers.errors import InputError, meant
from explainers.models.fetching import difference, similar_targets
from explainers.running.keys import unknown_key
from explainers.running.targets import named_options

FULL = "free space on its disk, or write to another one"
DENIED = "change its permissions, or use another path"
MENDED_BY = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), DENIED),
}
"""Error number of the operating system → what a user can do."""


def of_the_command(error: Exception, configs: Path) -> str:
    """The message for an error in composing a config.

    Args:
        error: what Hydra raised.
        configs: folder of the config files.
    """
    text = " ".join(str(error).split())
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        missing = str(error.missing_cfg_file)
        in_folders = missing.startswith("experiment/")  # the one group whose names have folders
        group, _, name = missing.partition("/") if in_folders else missing.rpartition("/")
        listed = "data" if group == "tasks" else group  # a task for all data
        files = (configs / listed).glob("**/*.yaml" if in_folders else "*.yaml")
        of_files = {path.relative_to(configs / listed).with_suffix("").as_posix() for path in files}
        names = sorted(of_files | named_options(listed).keys())
        if group == "target":
            return f"no target named {name}: {similar_targets(name, names)}"
        return f"no {group or 'config'} named {name}: {meant(name, names)}"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        return unknown_key(cause, configs)
    # Hydra says: Could not override 'callback'. No match in the defaults list, or: Did you mean to override x?
    unknown = re.search(r"Could not \w+ '([^']+)'\. (?:No match in|Did you mean to override ([^?]+))", text)
    if unknown and unknown[2]:
        return f"no group {unknown[1]} in the config of this program: did you mean {unknown[2]}?"
    if unknown:
        groups = sorted(path.name for path in configs.iterdir() if path.is_dir() and path.name != unknown[1])
        return f"no group {unknown[1]} in the config of this program: {meant(unknown[1], groups)}"
    if isinstance(error, ParseException):
        return f"cannot read {error.override!r}: {text.partition(' See https')[0]}: write key=value, or quote it"
    return text


def of_the_run(error: BaseException) -> str | None:
    """The message for an error that the user can correct; None for a bug."""
    while type(error) is InterpolationResolutionError and error.__context__ is not None:  # of a resolver, `of_model`
        error = error.__context__
    cause = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, InputError):
        return str(cause).rpartition(f"{type(cause).__name__}: ")[2]  # a loader process prepends its traceback
    if isinstance(cause, LocalEntryNotFoundError):
        return (
            "expected weights in the cache or from huggingface.co, got no connection: give the target's as"
            " weights=FILE, or connect this machine"
        )
    if isinstance(cause, OSError | SafetensorError):
        return _of_the_disk(cause)
    if isinstance(cause, RuntimeError) and re.search("state_dict|checkpoint", str(cause)):  # a file that timm reads
        return (
            f"expected weights of this model, got others: {difference(cause)}; name the model that they belong to"
            " (target=...), its number of classes (++target.model.num_classes=...), or another file (weights=...)"
        )
    if isinstance(error, InstantiationException):  # Hydra's text has three lines
        text = re.sub(r"full_key: (\S+)", r"(its settings are \1; HYDRA_FULL_ERROR=1 shows where)", str(error))
        return re.sub(r"""(\w+)\((["'])(.*)\2\)""", r"\1: \3", text, flags=re.DOTALL)
    missing = isinstance(cause, MissingMandatoryValue | MisconfigurationException | OmegaConfBaseException)
    return str(error) if missing else None


def _of_the_disk(error: OSError | SafetensorError) -> str | None:
    """The message for a full disk or a missing permission; None for other errors."""
    number = re.search(r"\(os error (\d+)\)", str(error))  # safetensors has the number only in its text
    code = int(number[1]) if number else getattr(error, "errno", None)
    if code not in MENDED_BY:
        return None
    # The error of an open file has no name
    path = getattr(error, "filename", None) or f"a file in {HydraConfig.get().runtime.output_dir}"
    return f"cannot read or write {path}: {os.strerror(code)}: {MENDED_BY[code]}"
