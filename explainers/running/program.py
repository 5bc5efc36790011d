"""How `train.py` and `eval.py` start, and the one line that a user reads after a mistake."""

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException
from safetensors import SafetensorError

from explainers.errors import InputError, suggest_names
from explainers.running.folder import lock_folder, run_dir
from explainers.running.processes import build_job_error, count_processes, is_launched
from explainers.running.settings import explain_unknown_key, name_key
from explainers.running.signals import answer_signals, is_first_process, write_line
from explainers.running.targets import CONFIGS, store_targets

TRACEBACK = "HYDRA_FULL_ERROR"
"""Environment variable; with 1, a user asks for tracebacks, unless `start` has set it together with `CAUGHT`."""

CAUGHT = "EXPLAINERS_CATCHES_ERRORS"
"""Environment variable of a command whose errors end in one line; processes that it starts inherit it."""

MISTAKES = (InputError, HydraException, OmegaConfBaseException, SafetensorError)
"""Errors whose text is enough for a user."""

OF_LIBRARIES = ("MisconfigurationException", "LocalEntryNotFoundError")
"""More of them, of Lightning and of the Hub, by their names, which need no import."""

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Error numbers of full disks and missing permissions."""

format_with_place = warnings.formatwarning
"""Python's own formatter of warnings."""


HELP = """\
usage: python {program} experiment=NAME [KEY=VALUE ...]

Experiments, whose heads in configs/experiment say what they need, how long they take, and what to expect:

{experiments}

Options:

  GROUP=NAME    takes another file of configs/GROUP, or name in configs/names: target=vit_tiny
  weights=FILE  reads the target's weights from a file
  debug=fast    (train.py) one batch: does it run?
  -m KEY=A,B    (train.py) a sweep: one run for each value
  --cfg job     prints the config, with all keys that can be set
  --hydra-help  lists the flags of Hydra, which composes the config

HYDRA_FULL_ERROR=1 before a command shows where its errors come from.
All of them: docs/training.md, docs/evaluation.md"""


def start(program: Callable[[], Any]) -> None:
    """Run a program of `hydra.main`; a mistake in its command ends it with one line, before anything else is done."""
    own = Path(sys.argv[0]).name
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # Hydra wants it there
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(HELP.format(program=own, experiments=indent("\n".join(list_experiments(own)), "  ")))
        return
    store_targets(sys.argv[1:])
    if wants_traceback():
        program()
        return
    os.environ[TRACEBACK] = os.environ[CAUGHT] = "1"  # with it, Hydra raises its errors and does not print them
    try:
        check_experiment(own, sys.argv[1:])
        program()
    except Exception as error:
        message = explain_command_error(error)
        if message is None:
            raise
        sys.exit(f"error: {message}")


def list_experiments(program: str) -> list[str]:
    """The names of the experiments whose heads have a command of a program, such as `train.py`."""
    folder = CONFIGS / "experiment"
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    own = [file for file in files if f"# Command: python {program} " in file.read_text(encoding="utf-8")]
    return [file.relative_to(folder).with_suffix("").as_posix() for file in own]


def check_experiment(program: str, words: Sequence[str]) -> None:
    """Raise an InputError if a command of a program names an experiment of the other one."""
    for other in {"train.py", "eval.py"} - {program}:
        for word in {f"experiment={name}" for name in list_experiments(other)} & {*words}:
            raise InputError(f"{word} is an experiment of {other}: run python {other} {word}")


def wants_traceback() -> bool:
    """Whether the user has set HYDRA_FULL_ERROR=1."""
    return os.environ.get(TRACEBACK) == "1" and CAUGHT not in os.environ


@contextmanager
def command(check: Callable[[DictConfig], None], cfg: DictConfig) -> Iterator[None]:
    """Inside, a program does its work: signals are handled, the folder is locked, and a mistake ends in one line.

    Args:
        check: checks the config, before anything is imported that takes seconds.
        cfg: the config.
    """
    if os.environ.keys() & {"RANK", "LOCAL_RANK", "SLURM_PROCID"}:
        import lightning  # noqa: F401 - which numbers the processes
    answer_signals()
    with errors_in_one_line(cfg), lock_folder(run_dir()):
        check(cfg)
        quiet_libraries()
        yield


@contextmanager
def once(trainer: DictConfig) -> Iterator[None]:
    """Inside, all processes of a command do the same: only the first of those that compute warns."""
    with warnings.catch_warnings():
        if not is_first_process() or count_processes(trainer) > 1 and not is_launched(trainer):
            warnings.simplefilter("ignore")
        yield


@contextmanager
def errors_in_one_line(cfg: DictConfig) -> Iterator[None]:
    """Exit with a one-line message if the user can correct the error; HYDRA_FULL_ERROR=1 shows its traceback.

    All other errors keep their traceback. A job of a sweep prints its line; the sweep goes on with the others, and then
    fails.
    """
    try:
        yield
    except Exception as error:
        message = explain_run_error(error, cfg)
        if message is None or wants_traceback():
            raise
        line = f"error: {' '.join(message.split())}"
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            sys.exit(line)
        write_line(line)
        raise build_job_error() from None


def explain_command_error(error: Exception) -> str | None:
    """The message for an error that Hydra raised while it composed a config; None for a bug."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return explain_missing_file(str(error.missing_cfg_file))
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        return explain_unknown_key(cause)
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return f"""{error.override}: {text}: quote special characters, as in 'weights="epoch=3.pth"'"""
    # A ValueError of Hydra, such as that for callbacks=null, comes before there is a run
    refused = isinstance(error, ValueError) and not HydraConfig.initialized()
    return text if isinstance(error, MISTAKES) or refused else explain_disk_error(cause or error)


def explain_missing_file(path: str) -> str:
    """The message for a file of configs that is missing, such as `data/digitz`."""
    # Names of experiments have folders; those of other groups do not
    group, _, name = path.partition("/") if path.startswith("experiment/") else path.rpartition("/")
    names = {file.relative_to(CONFIGS / group).with_suffix("").as_posix() for file in (CONFIGS / group).rglob("*.yaml")}
    with suppress(OSError):  # which the store raises for a group without names of its own
        names |= {stored.removesuffix(".yaml") for stored in ConfigStore.instance().list(group)}
    if group != "target":
        return f"no {group} named {name}: {suggest_names(name, sorted(names))}"
    from explainers.models.fetching import is_in_timm, similar_targets

    if is_in_timm(name):  # an experiment chooses it
        return f"no target named {name} in configs: say target={name} in the command, or add it to names/target.yaml"
    return f"no target named {name}: {similar_targets(name, sorted(names))}"


def explain_run_error(error: BaseException, cfg: DictConfig) -> str | None:
    """The message for an error that the user can correct, with the keys of a config; None for a bug."""
    while type(error) is InterpolationResolutionError and error.__context__ is not None:  # of a resolver
        error = error.__context__
    cause = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, InputError):
        text = cause.spell(partial(name_key, cfg))
        return text.rpartition(f"{type(cause).__name__}: ")[2]  # a loader process prepends its traceback
    known = isinstance(error, MISTAKES) or type(error).__name__ in OF_LIBRARIES
    return explain_disk_error(cause) or (str(error) if known else None)


def explain_disk_error(error: BaseException) -> str | None:
    """The message for a full disk or a missing permission; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in DISK:
        return None
    # The error of an open file has no name
    return f"cannot read or write {error.filename or f'a file in {run_dir()}'}: {error.strerror}"


def quiet_libraries() -> None:
    """Silence notices of libraries that say nothing about the run; warnings about the run become one line."""
    import lightning  # noqa: F401 - which sets levels and the format of warnings, too

    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself, and Hydra would again
    for name in ("lightning.pytorch", "lightning.fabric", "timm", "lightning.pytorch.profilers"):
        logging.getLogger(name).setLevel(logging.INFO if "profilers" in name else logging.WARNING)  # a table asked for
    notices = "not have many workers|in eval mode at the start|LeafSpec|than the logging interval|by the model summary"
    others = r"torch\.distributed\.\S+ is deprecated, use torch|Checkpoint directory .* exists and is not empty"
    if not is_first_process():
        warnings.filterwarnings("ignore", ".*worker processes in total")
    warnings.filterwarnings("ignore", f".*({notices}|{others})")
    warnings.formatwarning = format_warning


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The text of a warning: one line for a user; with its place in the code for a programmer.

    >>> format_warning("left out: a.jpg", UserWarning, "listing.py", 46)
    'warning: left out: a.jpg\\n'
    """
    if not issubclass(category, UserWarning):
        return format_with_place(message, category, filename, lineno, line)
    return f"warning: {' '.join(str(message).split())}\n"
