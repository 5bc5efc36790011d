"""How `train.py` and `eval.py` start and end, and what they print when the user has made a mistake."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, ConfigCompositionException, InstantiationException
from hydra.errors import OverrideParseException as ParseException
from hydra.types import RunMode
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from explainers.errors import InputError
from explainers.running.folder import locked, run_dir
from explainers.running.help import check_program, help_of
from explainers.running.keys import with_groups
from explainers.running.messages import of_the_command, of_the_run
from explainers.running.processes import job_failed
from explainers.running.signals import LOCKED, answer_signals, is_first_process, say
from explainers.running.targets import check_not_hidden

TRACEBACK = "HYDRA_FULL_ERROR"
"""Environment variable; with 1, a user asks for tracebacks."""

COMPOSING = "EXPLAINERS_COMPOSING"
"""Environment variable, which `start` sets with `TRACEBACK`: the user has not asked. Jobs of SLURM inherit both."""

MISTAKES = (InputError, InstantiationException, MisconfigurationException, OmegaConfBaseException, OSError)

PRINTED: set[str] = set()
"""Warnings that this process has printed."""

with_place = warnings.formatwarning
"""Python's own formatter of warnings."""


def start(program: Callable[[], Any], configs: Path, what: str = "") -> None:
    """Run a program of `hydra.main`; a mistake in its command ends it with one line, before anything else is done.

    Args:
        program: the decorated function.
        configs: folder of the config files.
        what: what the program does, for `--help`.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_of(Path(sys.argv[0]).name, what, configs))
        return
    sys.argv[1:] = with_groups(sys.argv[1:])
    if os.environ.get(TRACEBACK) == "1" and COMPOSING not in os.environ:
        program()
        return
    os.environ[TRACEBACK] = os.environ[COMPOSING] = "1"  # with it, Hydra raises its errors and does not print them
    try:
        check_program(sys.argv, configs)
        program()
    except (InputError, ConfigCompositionException, ParseException) as error:
        sys.exit(f"error: {of_the_command(error, configs)}")
    except CompactHydraException as error:  # jobs of a sweep have failed, whose errors are printed
        sys.exit(str(error))
    except ValueError as error:  # Hydra's, of a group without a file
        if "Config group override must be" not in str(error):
            raise
        groups = {path.name for path in configs.iterdir() if path.is_dir()}
        named = [word for word in sys.argv if re.fullmatch(rf"({'|'.join(groups)})=(null|None)?", word)]
        sys.exit(
            f"error: expected a file for a group, got {' '.join(named)}: leave the group out with ~, as in ~callbacks"
        )


@contextmanager
def command() -> Iterator[None]:
    """Inside, a program does its work: signals are handled, the folder is locked, and a mistake ends in one line."""
    quiet_libraries()
    answer_signals()
    with errors_in_one_line(), locked(run_dir()):
        check_not_hidden()
        yield


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exit with a one-line message if the user can correct the error; HYDRA_FULL_ERROR=1 shows its traceback.

    Such errors are `InputError`s, config keys that are misspelt or missing, values that a constructor refuses, full
    disks and missing permissions. All other errors keep their traceback. A job of a sweep prints its line; the sweep
    goes on with the others, and then fails.
    """
    if os.environ.pop(COMPOSING, None):
        os.environ.pop(TRACEBACK, None)
    try:
        yield
    except (*MISTAKES, SafetensorError) as error:
        message = of_the_run(error)
        if message is None or os.environ.get(TRACEBACK) == "1":
            raise
        line = f"error: {' '.join(message.split())}"
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            sys.exit(line)
        say(line)
        raise job_failed() from None


def quiet_libraries() -> None:
    """Silence notices of libraries that say nothing about the run; warnings about the run become one line.

    Warnings about files that are no images would be the same in every process: only the first one prints them.
    """
    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself, and Hydra would again
    PRINTED.clear()  # of an earlier job of a sweep
    for name in ("lightning.pytorch", "lightning.fabric", "timm"):
        logging.getLogger(name).setLevel(logging.WARNING)
    notices = "not have many workers|in eval mode at the start|LeafSpec|than the logging interval|by the model summary"
    others = r"torch\.distributed\.\S+ is deprecated, use torch|Checkpoint directory .* exists and is not empty"
    same_in_all = "left out: .* that Pillow does not read|the classes of .* are unknown"
    printed = LOCKED in os.environ or not is_first_process()  # by the parent process, or by the first one
    if not is_first_process():
        warnings.filterwarnings("ignore", ".*worker processes in total")
    warnings.filterwarnings("ignore", f".*({notices}|{others}{f'|{same_in_all}' if printed else ''})")
    warnings.formatwarning = in_one_line


def in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The text of a warning: one line for a user, printed once; with its place in the code for a programmer.

    >>> in_one_line("left out: a.jpg", UserWarning, "listing.py", 46)
    'warning: left out: a.jpg\\n'
    >>> in_one_line("left out: a.jpg", UserWarning, "listing.py", 46)
    ''
    """
    if not issubclass(category, UserWarning):
        return with_place(message, category, filename, lineno, line)
    text = f"warning: {' '.join(str(message).split())}\n"
    if text in PRINTED:  # Python's own record of warnings is lost when a library changes their filters
        return ""
    PRINTED.add(text)
    return text
