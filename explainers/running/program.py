"""How `train.py` and `eval.py` start and end: their help, and the one line that a user reads after a mistake."""

import errno
import logging
import os
import re
import shlex
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    CompactHydraException,
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)
from safetensors import SafetensorError

from explainers.errors import InputError, suggest_names
from explainers.running.folder import lock_folder, run_dir
from explainers.running.processes import build_job_error
from explainers.running.settings import expand_groups, explain_unknown_key, name_key
from explainers.running.signals import LOCKED, answer_signals, is_first_process, write_line
from explainers.running.targets import COMPOSING, check_not_hidden, named_options

TRACEBACK = "HYDRA_FULL_ERROR"
"""Environment variable; with 1, a user asks for tracebacks, unless `start` has set it together with `COMPOSING`."""

MISTAKES = (InputError, InstantiationException, OmegaConfBaseException)

FULL = "free space on its disk, or write to another one"
DENIED = "change its permissions, or use another path"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST), DENIED),
}
"""Error number of the operating system → what a user can do."""

PRINTED: set[str] = set()
"""Warnings that this process has printed."""

SPEAKS = [True]
"""Whether this process says what all processes of its command know."""

format_with_place = warnings.formatwarning
"""Python's own formatter of warnings."""

COMMAND = re.compile(r"^# Command: python (\S+\.py)", re.MULTILINE)

HELP = """\
usage: python {program} experiment=NAME [KEY=VALUE ...]

{what}

Experiments; the head of configs/experiment/NAME.yaml says what one needs, how long it takes, and what to expect:

{experiments}

Options:

{options}

All of them: {page}"""

OPTIONS = {
    "--cfg job": "prints the config, with all keys that can be set",
    "--hydra-help": "lists the flags of Hydra, which composes the config",
    "GROUP=NAME": "takes another file of configs/GROUP, or name in configs/names: target=vit_tiny",
    "weights=FILE": "reads the target's weights from a file",
}
OWN_OPTIONS = {
    "train.py": {"debug=fast": "one batch: does it run?", "-m KEY=A,B": "a sweep: one run for each value"},
    "eval.py": {"tasks=[A,B] methods=[C,D]": "what to measure: names of data, and of `explainers list`"},
}
PAGES = {"train.py": "docs/training.md", "eval.py": "docs/evaluation.md"}


def start(program: Callable[[], Any], configs: Path, what: str = "") -> None:
    """Run a program of `hydra.main`; a mistake in its command ends it with one line, before anything else is done.

    Args:
        program: the decorated function.
        configs: folder of the config files.
        what: what the program does, for `--help`.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(format_help(Path(sys.argv[0]).name, what, configs))
        return
    sys.argv[1:] = expand_groups(sys.argv[1:])
    if os.environ.get(TRACEBACK) == "1" and COMPOSING not in os.environ:
        program()
        return
    os.environ[TRACEBACK] = os.environ[COMPOSING] = "1"  # with it, Hydra raises its errors and does not print them
    try:
        check_program(sys.argv, configs)
        program()
    except (InputError, ConfigCompositionException, OverrideParseException) as error:
        sys.exit(f"error: {explain_command_error(error, configs)}")
    except CompactHydraException as error:  # jobs of a sweep have failed, whose errors are printed
        sys.exit(str(error))
    except (OSError, ValueError) as error:  # Hydra's, of a folder where it cannot log, or of a group without a file
        message = explain_disk_error(error.__cause__ or error)
        if "Config group override must be" in str(error):
            message = "expected a file for each group, got null: leave a group out with ~, as in ~callbacks"
        if message is None:
            raise
        sys.exit(f"error: {message}")


def check_program(command: list[str], configs: Path) -> None:
    """Raise an InputError if the command names an experiment of another program."""
    own = Path(command[0]).name
    for name in (word.partition("=")[2] for word in command[1:] if word.startswith("experiment=")):
        path = configs / "experiment" / f"{name}.yaml"
        program = COMMAND.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        if program and own != program[1]:
            raise InputError(
                f"expected an experiment of {own}, got {name}, which is one of {program[1]}: run python {program[1]}"
                f" experiment={name}"
            )


def format_help(program: str, what: str, configs: Path) -> str:
    """The text of `--help` of a program, such as `train.py`: what it does, its experiments and its options."""
    folder, experiments = configs / "experiment", {}
    for path in sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path)):
        head = path.read_text(encoding="utf-8")
        if (found := COMMAND.search(head)) and found[1] == program:
            text = head.partition("\n# ")[2].replace("\n# ", " ")
            name = path.relative_to(folder).with_suffix("").as_posix()
            experiments[name] = re.split(r"\.\s|(?<=\?)\s", text)[0]  # the first sentence
    options = format_rows(OPTIONS | OWN_OPTIONS[program])
    rows = format_rows(experiments)
    return HELP.format(program=program, what=what, experiments=rows, options=options, page=PAGES[program])


def format_rows(table: Mapping[str, str]) -> str:
    """The lines of a table of two columns, of at most 120 characters."""
    width = max(map(len, table)) + 2
    shortened = {name: textwrap.shorten(text, 118 - width, placeholder=" ...") for name, text in table.items()}
    return "\n".join(f"  {name:{width}}{text}" for name, text in shortened.items())


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
    SPEAKS[0] = LOCKED not in os.environ and is_first_process()
    with errors_in_one_line(cfg), lock_folder(run_dir()):
        check_not_hidden()
        check(cfg)
        quiet_libraries()
        yield


@contextmanager
def once() -> Iterator[None]:
    """Inside, all processes of a command do the same: only the first to do it warns, a parent before its children."""
    with warnings.catch_warnings():
        if not SPEAKS[0]:
            warnings.simplefilter("ignore")
        yield


@contextmanager
def errors_in_one_line(cfg: DictConfig) -> Iterator[None]:
    """Exit with a one-line message if the user can correct the error; HYDRA_FULL_ERROR=1 shows its traceback.

    Such errors are `InputError`s, config keys that are misspelt or missing, values that a constructor refuses, full
    disks and missing permissions. All other errors keep their traceback. A job of a sweep prints its line; the sweep
    goes on with the others, and then fails.
    """
    if os.environ.pop(COMPOSING, None):
        os.environ.pop(TRACEBACK, None)
    try:
        yield
    except Exception as error:
        message = explain_run_error(error, cfg)
        if message is None or os.environ.get(TRACEBACK) == "1":
            raise
        line = f"error: {' '.join(message.split())}"
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            sys.exit(line)
        write_line(line)
        raise build_job_error() from None


def explain_command_error(error: Exception, configs: Path) -> str:
    """The message for an error that Hydra raised while it composed a config."""
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
        if group != "target":
            return f"no {group or 'config'} named {name}: {suggest_names(name, names)}"
        from explainers.models.fetching import similar_targets

        return f"no target named {name}: {similar_targets(name, names)}"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        return explain_unknown_key(cause, configs)
    # Hydra says: Could not override 'callback'. No match in the defaults list, or: Did you mean to override x?
    unknown = re.search(r"Could not \w+ '([^']+)'\. (?:No match in|Did you mean to override ([^?]+))", text)
    if unknown:
        groups = sorted(path.name for path in configs.iterdir() if path.is_dir() and path.name != unknown[1])
        suggestion = f"did you mean {unknown[2]}?" if unknown[2] else suggest_names(unknown[1], groups)
        return f"no group {unknown[1]} in the config of this program: {suggestion}"
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        advice = f"quote the value, as in {quote_value(key, value)}" if value else "write key=value"
        return f"cannot read {error.override!r}: {text.partition(' See https')[0]}: {advice}"
    return text


def quote_value(key: str, value: str) -> str:
    """A setting whose value has characters of Hydra's grammar, as it is typed into a shell.

    >>> print(quote_value("weights", "epoch=3.pth"))
    'weights="epoch=3.pth"'
    """
    return shlex.quote(f'{key}="{value}"')


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
    if type(cause).__name__ == "LocalEntryNotFoundError":  # of the Hub
        return (
            "expected weights in the cache or from huggingface.co, got no connection: give the target's as"
            " weights=FILE, or connect this machine"
        )
    if isinstance(cause, OSError | SafetensorError):
        return explain_disk_error(cause)
    if error is not cause and isinstance(cause, RuntimeError) and re.search("state_dict|checkpoint", str(cause)):
        from explainers.models.fetching import difference  # timm has read a file

        return (
            f"expected weights of this model, got others: {difference(cause)}; name the model that they belong to"
            " (target=...), its number of classes (++target.model.num_classes=...), or another file (weights=...)"
        )
    if isinstance(error, InstantiationException):  # Hydra's text has three lines
        text = re.sub(r"full_key: (\S+)", r"(its settings are \1; HYDRA_FULL_ERROR=1 shows where)", str(error))
        return re.sub(r"""(\w+)\((["'])(.*)\2\)""", r"\1: \3", text, flags=re.DOTALL)
    of_lightning = type(cause).__name__ == "MisconfigurationException"  # by its name, which needs no import
    return str(error) if of_lightning or isinstance(cause, MISTAKES) else None


def explain_disk_error(error: BaseException) -> str | None:
    """The message for a full disk or a missing permission; None for other errors."""
    number = re.search(r"\(os error (\d+)\)", str(error))  # safetensors has the number only in its text
    code = int(number[1]) if number else getattr(error, "errno", None)
    if code not in REMEDIES:
        return None
    # The error of an open file has no name
    path = getattr(error, "filename", None) or f"a file in {HydraConfig.get().runtime.output_dir}"
    return f"cannot read or write {path}: {os.strerror(code)}: {REMEDIES[code]}"


def quiet_libraries() -> None:
    """Silence notices of libraries that say nothing about the run; warnings about the run become one line."""
    import lightning  # noqa: F401 - which sets levels and the format of warnings, too

    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself, and Hydra would again
    PRINTED.clear()  # of an earlier job of a sweep
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
    """The text of a warning: one line for a user, printed once; with its place in the code for a programmer.

    >>> format_warning("left out: a.jpg", UserWarning, "listing.py", 46)
    'warning: left out: a.jpg\\n'
    >>> format_warning("left out: a.jpg", UserWarning, "listing.py", 46)
    ''
    """
    if not issubclass(category, UserWarning):
        return format_with_place(message, category, filename, lineno, line)
    text = f"warning: {' '.join(str(message).split())}\n"
    if text in PRINTED:  # Python's own record of warnings is lost when a library changes their filters
        return ""
    PRINTED.add(text)
    return text
