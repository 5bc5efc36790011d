"""A config has no key that nothing reads, and its files are chosen by short names."""

import re

import pytest
from commands import ROOT, composed
from omegaconf import OmegaConf

from explainers.running.settings import expand_groups

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


@pytest.mark.parametrize(
    ("experiment", "short", "key"),
    [
        ("demo/anyhead", "explainer=tve", "explainer"),
        ("anyhead", "teacher=propagation", "module.loss"),
        ("self_explaining", "labels=method", "module.labels"),
        ("self_explaining", "projection=simplex", "module.head.projection"),
    ],
)
def test_a_file_may_be_chosen_by_the_key_of_its_settings(experiment, short, key, tmp_path):
    (long,) = expand_groups([short])
    assert long.endswith(f"@{key}={short.partition('=')[2]}")
    before, cfg = (composed(f"experiment={experiment}", *own, folder=tmp_path) for own in ((), (long,)))
    assert OmegaConf.select(cfg, key) != OmegaConf.select(before, key)
