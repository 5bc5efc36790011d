"""The house keeps to the budgets in CONTRIBUTING.md. What needs more takes it elsewhere, or raises the number there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = [path for path in (ROOT / "explainers").rglob("*.py") if "running" not in path.parts]
SITUATION = re.compile(r"mark\.situation\((\d+)\)")
CODE = [path for folder in ("explainers", "datamodules", "callbacks") for path in (ROOT / folder).rglob("*.py")]


def count_code_lines(paths):
    """Lines with code: without blank lines, comments and docstrings, so that joining or shaving lines gains nothing."""
    return sum(map(count_lines_of_file, paths))


@cache
def parse(path):
    """All nodes of the syntax tree."""
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def count_lines_of_file(path):
    lines = enumerate(map(str.strip, path.read_text().splitlines()), start=1)
    code, docstrings = {number for number, line in lines if line and not line.startswith("#")}, set()
    for node in parse(path):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else []:
            if isinstance(child, ast.Expr) and isinstance(getattr(child.value, "value", None), str):
                docstrings |= {*range(child.lineno, child.end_lineno + 1)}
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno > node.lineno:
            code |= {*range(node.lineno, node.end_lineno + 1)}  # blank lines of a string are no blank lines
    return len(code - docstrings)


def count_words(paths):
    """Words with a letter or a digit: not the bars of tables."""
    return sum(bool(re.search(r"\w", word)) for path in paths for word in path.read_text().split())


def count_public_names():
    """Names in `__all__` of the library and of its rooms."""
    names = 0
    for path in ROOT.glob("explainers/**/__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
                names += len(ast.literal_eval(node.value))
    return names


def count_long_functions(most=50):
    """Functions of the library, the data modules and the callbacks whose body has more lines, without its docstring."""
    long = 0
    for path in CODE:
        for node in parse(path):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                long += bool(body) and node.end_lineno - body[0].lineno + 1 > most
    return long


COUNTS = {
    "loose files in `explainers/`": lambda: len([*(ROOT / "explainers").glob("*.py")]),
    "rooms": lambda: len([*ROOT.glob("explainers/*/__init__.py")]),
    "code lines of the library": lambda: count_code_lines(LIBRARY),
    "code lines of the runner": lambda: count_code_lines(ROOT.glob("explainers/running/*.py")),
    "code lines of the laboratory": lambda: count_code_lines(ROOT.glob("benchmarks/**/*.py")),
    "code lines of tests": lambda: count_code_lines(ROOT.glob("tests/**/*.py")),
    "lines of the longest file": lambda: max(len(path.read_text().splitlines()) for path in CODE),
    "functions over 50 lines": count_long_functions,
    "public names": count_public_names,
    "experiments": lambda: len([*ROOT.glob("configs/experiment/**/*.yaml")]),
    "config files": lambda: len([*ROOT.glob("configs/**/*.yaml")]),
    "words of README": lambda: count_words([ROOT / "README.md"]),
    "words of README and docs": lambda: count_words([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]),
}


def budgets():
    """What is counted → the most that there may be, from the table under `Budgets`."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Budgets")[2].partition("\n## ")[0]
    return {what: int(most.replace(",", "")) for what, most in re.findall(r"^\| (.+?) \| ([\d,]+) \|", section, re.M)}


def test_the_table_has_a_line_for_everything_that_is_counted():
    assert list(budgets()) == list(COUNTS)


@pytest.mark.parametrize("what", COUNTS)
def test_the_house_keeps_to_its_budget(what):
    assert COUNTS[what]() <= budgets()[what]


def test_every_situation_from_public_reports_has_a_test():
    """Reports of people who explain models, numbered 1 to 44: each has a test with the right value."""
    found = {int(number) for path in ROOT.glob("tests/**/*.py") for number in SITUATION.findall(path.read_text())}
    assert found == {*range(1, 45)}
