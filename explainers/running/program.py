"""How `train.py` and `eval.py` start and end: what they print for a user's mistake, and what surrounds their work."""

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
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.errors import OverrideParseException as ParseException
from hydra.types import RunMode
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from explainers.errors import InputError
from explainers.running.folder import locked, run_dir
from explainers.running.messages import of_the_command, of_the_run
from explainers.running.signals import LOCKED, answer_signals, is_first_process

TRACEBACK = "HYDRA_FULL_ERROR"
"""Environment variable with which a user asks for tracebacks: 1."""

COMPOSING = "EXPLAINERS_COMPOSING"
"""Environment variable that says that `start` has set `TRACEBACK`; jobs that SLURM starts later inherit both."""

MISTAKES = (InputError, InstantiationException, MisconfigurationException, OmegaConfBaseException, OSError)

with_place = warnings.formatwarning
"""Python's own text of a warning."""


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


@contextmanager
def command() -> Iterator[None]:
    """What surrounds the work of a program: answered signals, a locked folder, and one line for a mistake."""
    quiet_libraries()
    answer_signals()
    with errors_in_one_line(), locked(run_dir()):
        yield


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


def quiet_libraries() -> None:
    """Silence notices of libraries that tell a user nothing about the run; warnings about the run stay, as one line.

    What every process of a command would say alike, of files that are no images, the first one says alone.
    """
    for name in ("lightning.pytorch", "lightning.fabric", "timm"):
        logging.getLogger(name).setLevel(logging.WARNING)
    notices = "not have many workers|in eval mode at the start|LeafSpec|than the logging interval|by the model summary"
    others = r"torch\.distributed\.\S+ is deprecated, use torch|Checkpoint directory .* exists and is not empty"
    alike = "left out: .* that Pillow does not read|the classes of .* are unknown"
    said = LOCKED in os.environ or not is_first_process()  # by the parent process, or by the first one
    warnings.filterwarnings("ignore", f".*({notices}|{others}{f'|{alike}' if said else ''})")
    warnings.formatwarning = in_one_line


def in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as a user reads it; the place in the code belongs to warnings for programmers.

    >>> in_one_line("left out: a.jpg", UserWarning, "listing.py", 46)
    'warning: left out: a.jpg\\n'
    """
    if not issubclass(category, UserWarning):
        return with_place(message, category, filename, lineno, line)
    return f"warning: {' '.join(str(message).split())}\n"
