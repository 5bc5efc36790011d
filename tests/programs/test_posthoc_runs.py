"""`python eval.py methods=[...]`: post-hoc methods by their names."""

import json

import pytest
from commands import QUIET, SMALL_DIGITS, composed, evaluate
from hydra.utils import instantiate

from explainers import posthoc

TINY = ("target=tiny", "tasks=[digits]", "evaluation.levels=3", *QUIET, "logger=csv", "figures=[]", "pictures.images=1")
DIGITS = tuple(f"tasks.digits.{setting}" for setting in SMALL_DIGITS)
RANDOMISED = (*DIGITS, "evaluation.probes=[randomisation]")


@pytest.mark.slow
def test_methods_are_rows_beside_the_explainers_and_belong_to_the_settings(tmp_path):
    methods = "methods=[GAE,DecompX-SkipPLUS,{ResLRP:{gamma:0.5}},{RISE:{masks:4}}]"
    evaluate(*TINY, *RANDOMISED, methods, folder=tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["results"]["digits"]
    assert list(rows) == ["chance", "GAE", "DecompX-SkipPLUS", "ResLRP(gamma=0.5)", "RISE(masks=4)"]
    assert all(row["images"] == 7 for row in rows.values())
    assert rows["GAE"]["randomisation"] < 0.9 < 1 == rows["chance"]["randomisation"]
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    evaluate(*TINY, *RANDOMISED, "methods=[GAE,{ResLRP:{gamma:0.25}}]", folder=tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["results"]["digits"]
    assert list(found) == ["chance", "GAE", "ResLRP(gamma=0.25)"]
    assert all(found[name] == rows[name] for name in ("chance", "GAE"))


@pytest.mark.slow
def test_the_methods_of_an_experiment_exist(tmp_path):
    cfg = composed("experiment=posthoc", "target=tiny", folder=tmp_path, config="eval")
    built = posthoc.build_all(cfg.methods, instantiate(cfg.target), instantiate(cfg.grid))
    assert len(built) == len(cfg.methods) > 10
