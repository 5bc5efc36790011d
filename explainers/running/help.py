"""The help of `train.py` and `eval.py`: what the program does, its experiments, and how to see and change a config."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from explainers.errors import InputError

COMMAND = re.compile(r"^# Command: python (\S+\.py)", re.MULTILINE)

HELP = """\
usage: python {program} experiment=NAME [KEY=VALUE ...]

{what}

Experiments; the head of configs/experiment/NAME.yaml says what one needs, how long it takes, and what to expect:

{experiments}

Options:

{options}

All of them: {page}"""

COMMON = {
    "--cfg job": "prints the config, with all keys that can be set",
    "--hydra-help": "lists the flags of Hydra, which composes the config",
    "GROUP=NAME": "takes another file of configs/GROUP, or name in configs/names: target=vit_tiny",
    "weights=FILE": "reads the target's weights from a file",
}
OWN = {
    "train.py": {"debug=fast": "one batch: does it run?", "-m KEY=A,B": "a sweep: one run for each value"},
    "eval.py": {"tasks=[A,B] methods=[C,D]": "what to measure: names of data, and of `explainers list`"},
}
PAGES = {"train.py": "docs/training.md", "eval.py": "docs/evaluation.md"}


def experiments_of(program: str, configs: Path) -> dict[str, str]:
    """Name → what it does, of the experiments of a program: the first sentence in the heads of their files.

    Args:
        program: name of its file, such as `train.py`.
        configs: folder of the config files.
    """
    folder = configs / "experiment"
    paths = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    heads = {path.relative_to(folder).with_suffix("").as_posix(): path.read_text() for path in paths}
    own = {name: head for name, head in heads.items() if (found := COMMAND.search(head)) and found[1] == program}
    texts = {name: head.partition("\n# ")[2].replace("\n# ", " ") for name, head in own.items()}
    return {name: re.split(r"\.\s|(?<=\?)\s", text)[0] for name, text in texts.items()}


def help_of(program: str, what: str, configs: Path) -> str:
    """The text of `--help`.

    Args:
        program: name of its file, such as `train.py`.
        what: what the program does.
        configs: folder of the config files.
    """
    tables = {"experiments": experiments_of(program, configs), "options": COMMON | OWN[program]}
    texts = {name: "\n".join(rows(table)) for name, table in tables.items()}
    return HELP.format(program=program, what=what, page=PAGES[program], **texts)


def rows(table: Mapping[str, str]) -> Iterator[str]:
    """The lines of a table of two columns, of at most 120 characters."""
    width = max(map(len, table)) + 2
    for name, text in table.items():
        yield f"  {name:{width}}{textwrap.shorten(text, 118 - width, placeholder=' ...')}"


def check_program(command: list[str], configs: Path) -> None:
    """Raise an InputError if the command names an experiment of another program."""
    own = Path(command[0]).name
    for name in (word.partition("=")[2] for word in command[1:] if word.startswith("experiment=")):
        path = configs / "experiment" / f"{name}.yaml"
        program = COMMAND.search(path.read_text()) if path.is_file() else None
        if program and own != program[1]:
            raise InputError(
                f"expected an experiment of {own}, got {name}, which is one of {program[1]}: run python {program[1]}"
                f" experiment={name}"
            )
