"""The commands of explainability vectors, one after the other, on a tiny target."""

import csv
import json

import pytest
from commands import QUIET, ROOT, composed, evaluate, train
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import train as training
from explainers.saved.weights import read_weights
from explainers.shapley import ShapleyLabels
from explainers.vectors import SelfExplaining

TINY = ("target=tiny", "grid.patch_size=16", "++grid.differs=true", *QUIET)
FAST = ("trainer.max_epochs=1", "data.batch_size=8", "data.size.train=16", "callbacks=train")
MEASURED = ("logger=csv", "data.size.val=6")
LAMBDAS = "0.25", "0.75", "1.5"


class Repeated(Exception):
    """Something is computed for a second time."""


def list_overrides(root):
    return [
        "experiment=demo/vector",
        *(*TINY, *MEASURED, f"cache_dir={root / 'cache'}"),
        *("data.size.test=4", "data.domain=small", "module.labels.budget=20"),
        f"module.vector.explaining=[{root / 'source/model.safetensors'}]",
        f"module.onto={root / 'predicting/model.safetensors'}",
    ]


def transfer(root, *own, name):
    return train(*list_overrides(root), *own, folder=root / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of the runs: a source, a model of the domain that it has not seen, and the transfer."""
    root = tmp_path_factory.mktemp("vectors")
    cache = f"cache_dir={root / 'cache'}"
    fast = (*TINY, *FAST, *MEASURED, cache)
    pairs = "module.loss.pairs=2"
    train("experiment=demo/source", *fast, pairs, "data.without=small", folder=root / "source")
    train("experiment=demo/predicting", *fast, "data.domain=small", folder=root / "predicting")
    transfer(root, name="vector")
    return root


@pytest.mark.slow
def test_a_transfer_leaves_the_sweep_the_best_model_and_what_a_test_says_of_it(runs):
    metrics = json.loads((runs / "vector/metrics.json").read_text())
    with open(runs / "vector/csv/version_0/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["sweep/lambda_2"]]
    assert [float(row["sweep/lambda_2"]) for row in rows] == pytest.approx([i / 10 for i in range(11)])
    untouched = float(rows[0]["sweep/accuracy"])
    allowed = [row for row in rows if float(row["sweep/accuracy"]) >= untouched - 0.01 - 1e-6]
    best = max(allowed, key=lambda row: float(row["sweep/rank_correlation"]))
    assert metrics["val/lambda_2"] == pytest.approx(float(best["sweep/lambda_2"]))
    assert {f"test/{which}/relative_error" for which in ("untouched", "transferred")} <= metrics.keys()
    assert read_weights(runs / "vector/model.safetensors")[0]["lambda_2"] == pytest.approx(metrics["val/lambda_2"])
    assert (runs / "vector/vector.safetensors").is_file() and (runs / "vector/scaled.safetensors").is_file()
    assert not (runs / "vector/checkpoints").exists()  # nothing was trained


@pytest.mark.slow
def test_a_sweep_of_jobs_repeats_neither_labels_nor_jobs(runs, monkeypatch):
    """A job that a kill ended before its model was written is measured again."""

    def repeats(*_):
        raise Repeated

    monkeypatch.setattr(ShapleyLabels, "__call__", repeats)
    first, _ = (transfer(runs, f"module.lambda_2={value}", name=f"job_{value}") for value in (0.5, 1.0))
    history = (runs / "job_0.5/csv/version_0/metrics.csv").read_bytes()
    monkeypatch.setattr(SelfExplaining, "predict_and_explain", repeats)
    assert transfer(runs, "module.lambda_2=0.5", name="job_0.5") == pytest.approx(first)
    assert (runs / "job_0.5/csv/version_0/metrics.csv").read_bytes() == history
    (runs / "job_1.0/model.safetensors").unlink()
    with pytest.raises(Repeated):
        transfer(runs, "module.lambda_2=1.0", name="job_1.0")


def sweep(*overrides):
    """Run `python train.py -m` in this process."""
    earlier = HydraConfig.instance().cfg
    try:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            GlobalHydra.instance().hydra.multirun("train", training.main.__wrapped__, [*overrides], False)
    finally:
        HydraConfig.instance().cfg = earlier


@pytest.mark.slow
def test_validation_chooses_one_job_of_a_sweep_which_alone_is_tested(runs, capsys):
    places = f"hydra.sweep.dir={runs}", "hydra.sweep.subdir=swept"
    sweep(*list_overrides(runs), f"module.lambda_2={','.join(LAMBDAS)}", "module.selection.tolerance=1", *places)
    lines = capsys.readouterr().out.splitlines()
    found = {value: json.loads((runs / f"swept,module.lambda_2={value}/metrics.json").read_text()) for value in LAMBDAS}
    losses = {value: metrics["val/loss"] for value, metrics in found.items()}
    assert losses == {value: -metrics["val/rank_correlation"] for value, metrics in found.items()}
    order = sorted(losses, key=losses.get)
    tested = [value for value, metrics in found.items() if any(name.startswith("test/") for name in metrics)]
    assert tested == order[:1]
    values = ", ".join(f"module.lambda_2={value} {losses[value]:.4g}" for value in order)
    assert lines[-1].startswith(f"best of 3 jobs by val/loss: module.lambda_2={order[0]} ({values}); tested, ")
    assert sum(line.startswith("on test images: ") for line in lines) == 1


@pytest.mark.slow
def test_the_transferred_model_is_measured_beside_the_others(runs):
    """A task names the files of its own explainers."""
    weights = {
        **{"no_transfer": "predicting/model", "no_transfer_scaled": "vector/scaled"},
        **dict.fromkeys(("transferred", "upper_bound"), "vector/model"),
    }
    budgets = ("kernel_shap_50", "kernel_shap_100", "kernel_shap_200", "again", "reference")
    evaluate(
        "experiment=studies/vectors_digits",
        *(*TINY, "evaluation.levels=3", "evaluation.k=2", "~figures.lambdas", "pictures=null"),
        *("~tasks.plain", "~tasks.inverted", "~tasks.coloured", "figures.passes.one=[no_transfer,transferred]"),
        *(f"explainers.{name}.budget=20" for name in budgets),
        *(f"tasks.small.explainers.{name}.weights={runs / run}.safetensors" for name, run in weights.items()),
        *(f"tasks.small.target.head={runs / 'predicting/model.safetensors'}", "tasks.small.data.size.test=4"),
        "target._target_=explainers.vectors.exported_target",
        folder=runs / "evaluation",
    )
    results = json.loads((runs / "evaluation/results.json").read_text())["results"]["small"]
    assert results["no_transfer"]["e_rmse"] != results["no_transfer_scaled"]["e_rmse"]
    assert {"accuracy", "iou", "relative_error", "rank_correlation_error"} <= results["transferred"].keys()
    assert "accuracy" not in results["kernel_shap_50"]
    assert all((runs / "evaluation" / name).is_file() for name in ("passes.png", "table.md"))


def test_the_sweep_of_wandb_sets_a_key_of_its_experiment(tmp_path):
    ((key, given),) = OmegaConf.load(ROOT / "configs/sweeps/lambda_2.yaml").parameters.items()
    for value in given["values"]:
        cfg = composed("experiment=explainability_vector", f"{key}={value}", folder=tmp_path)
        assert OmegaConf.select(cfg, key) == json.loads(value)
