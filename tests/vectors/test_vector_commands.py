"""The commands of explainability vectors, one after the other, on a tiny target."""

import csv
import json

import pytest
import torch
from commands import QUIET, evaluate, train

from explainers.weight_files import read_weights

TINY = (
    "target=tiny",
    "grid.patch_size=16",
    "projection@explainer.projection=simplex",
    "data.size.train=24",
    "data.size.val=9",
)
FAST = ("trainer.max_epochs=2", "data.batch_size=8", "logger=csv", "callbacks=train", *QUIET)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of the runs: twins of one domain, a model of another, the transfer, and its evaluation."""
    root = tmp_path_factory.mktemp("vectors")
    cache = f"cache_dir={root / 'cache'}"
    plain, other = root / "plain/model.safetensors", root / "small/model.safetensors"
    for domain in ("plain", "small"):
        train("experiment=quickstart_predicting", *TINY, *FAST, cache, f"data.domain={domain}", folder=root / domain)
    few = ("explainer.labels.budget=20", cache)
    train(
        "experiment=quickstart_explaining", *TINY, *FAST, *few, f"explainer.teacher={plain}", folder=root / "explaining"
    )
    models = (f"explainer.predicting={plain}", f"explainer.explaining={root / 'explaining/model.safetensors'}")
    train(
        "experiment=quickstart_vector",
        *("target=tiny", "grid.patch_size=16", "data.size.val=9", "data.size.test=7", "logger=csv", *QUIET),
        *(*few, *models, f"explainer.onto={other}", "data.domain=small"),
        folder=root / "vector",
    )
    return root


@pytest.mark.slow
def test_a_transfer_leaves_the_sweep_the_best_model_and_what_a_test_says_of_it(runs):
    metrics = json.loads((runs / "vector/metrics.json").read_text())
    with open(runs / "vector/csv/version_0/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["sweep/lambda_2"]]
    assert [float(row["sweep/lambda_2"]) for row in rows] == pytest.approx([i / 10 for i in range(21)])
    untouched = float(rows[0]["sweep/accuracy"])
    allowed = [row for row in rows if float(row["sweep/accuracy"]) >= untouched - 0.03 - 1e-6]
    best = min(allowed, key=lambda row: float(row["sweep/e_rmse"]))
    assert metrics["val/lambda_2"] == pytest.approx(float(best["sweep/lambda_2"]))
    assert {f"test/{which}/e_rmse" for which in ("untouched", "transferred")} <= metrics.keys()
    assert read_weights(runs / "vector/model.safetensors")[0]["lambda_2"] == pytest.approx(metrics["val/lambda_2"])
    assert (runs / "vector/vector.safetensors").is_file()
    assert not (runs / "vector/checkpoints").exists()  # nothing was trained


@pytest.mark.slow
def test_twins_differ_in_their_loss_alone(runs):
    states = []
    for name in ("plain", "explaining"):
        identity, weights = read_weights(runs / name / "model.safetensors")
        states.append(weights)
        assert identity["alpha"] == {"plain": 1, "explaining": 0.8}[name]
    assert torch.equal(states[0]["head.weight"], states[1]["head.weight"])
    assert not torch.equal(states[0]["backbone.norm.weight"], states[1]["backbone.norm.weight"])


@pytest.mark.slow
def test_the_transferred_model_is_measured_beside_the_others(runs):
    """A task names the files of its own explainers."""
    weights = {"no_transfer": "small", "transferred": "vector"}
    evaluate(
        "experiment=quickstart_vectors_eval",
        *("target=tiny", "grid.patch_size=16", *QUIET, "evaluation.levels=3", "evaluation.k=2", "~figures.lambdas"),
        *(
            "~tasks.inverted",
            "~tasks.coloured",
            "~explainers.upper_bound",
            "figures.passes.one=[no_transfer,transferred]",
        ),
        *(
            f"explainers.{name}.budget=20"
            for name in ("kernel_shap_50", "kernel_shap_100", "kernel_shap_200", "reference")
        ),
        "~tasks.small.explainers.upper_bound",
        *(f"tasks.small.explainers.{name}.weights={runs / run}/model.safetensors" for name, run in weights.items()),
        *(f"tasks.small.target.head={runs / 'small/model.safetensors'}", "tasks.small.data.size.test=5"),
        "target._target_=explainers.vectors.exported_target",
        folder=runs / "evaluation",
    )
    found = json.loads((runs / "evaluation/results.json").read_text())["results"]["small"]
    assert found["no_transfer"]["e_rmse"] != found["transferred"]["e_rmse"]
    assert {"accuracy", "iou", "rank_correlation"} <= found["transferred"].keys()
    assert "accuracy" not in found["kernel_shap_50"]
    assert all((runs / "evaluation" / name).is_file() for name in ("passes.png", "small.png", "table.md"))
