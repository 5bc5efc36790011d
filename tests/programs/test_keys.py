"""A config has no key that nothing reads."""

import re

import pytest
from commands import ROOT, composed

READERS = {
    "train": ("train.py", "explainers/running/*.py", "configs/**/*.yaml"),
    "eval": ("eval.py", "explainers/running/*.py", "configs/**/*.yaml"),
}


@pytest.mark.parametrize("program", READERS)
def test_a_program_or_another_key_reads_every_key_at_the_top(program, tmp_path):
    """Deeper keys are arguments of a `_target_`, which refuses unknown ones when an experiment takes its step."""
    text = "\n".join(path.read_text() for pattern in READERS[program] for path in ROOT.glob(pattern))
    read = set(re.findall(r"""(?:\bcfg\.(?:(?:get|pop)\(")?|\$\{(?:[\w.]+:)?)(\w+)""", text))
    keys = set(composed(folder=tmp_path, config=program))
    assert keys - read == set()
