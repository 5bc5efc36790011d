"""What the README says to type works."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text().replace("\\\n", " ")
COMMANDS = sorted(set(re.findall(r"python (train|eval)\.py ([^\n`#]*)", TEXT)))
MAKE = sorted(set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)?)\b", TEXT)))


@pytest.mark.parametrize(("script", "arguments"), COMMANDS, ids=" ".join)
def test_every_command_of_the_readme_composes(script, arguments):
    overrides = [word for word in shlex.split(arguments) if word not in ("-m", "...")]
    with initialize(config_path="../configs", version_base="1.3"):
        assert compose(script, overrides)


def test_the_readme_shows_commands():
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("target", MAKE)
def test_every_make_target_of_the_readme_is_there(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_the_program_of_the_readme_runs():
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    program += "\nassert heatmaps.shape == (4, 8, 8) and everything.shape == (4, 10, 8, 8)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
