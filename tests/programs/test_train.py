"""What a training run leaves behind, and what is left of it after a kill."""

import json
import os

import pytest
import torch
from commands import DIGITS, ROOT, TVE_RUN, composed, csv_rows, train
from safetensors.torch import load_file


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def checkpoint(folder, name):
    return torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=False)


PICTURES = ("callbacks=explain", "callbacks.heatmaps.images=1", "callbacks.check.images=2", "callbacks.check.levels=3")
RUN = (*TVE_RUN, *DIGITS, *PICTURES, "trainer.max_epochs=2", "trainer.log_every_n_steps=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    loss = train(*RUN, folder=folder)
    assert loss == json.loads((folder / "metrics.json").read_text())["val/loss"]
    return folder


@pytest.mark.slow
def test_a_run_leaves_its_config_versions_metrics_history_checkpoints_heatmaps_and_explainer(finished):
    config = (finished / "config.yaml").read_text()
    assert "explainers.tve.TVE" in config and "${" not in config  # resolved
    assert json.loads((finished / "versions.json").read_text())["packages"]["torch"] == torch.__version__.split("+")[0]
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["val/loss"] > 0 and metrics["train/loss"] > 0
    losses = [float(row["val/loss"]) for row in csv_rows(finished / "csv/version_0/metrics.csv") if row["val/loss"]]
    assert len(losses) == 2 and metrics["val/loss"] == pytest.approx(losses[-1])
    exported, last = load_file(finished / "explainer.safetensors"), checkpoint(finished, "last")["state_dict"]
    assert same(last, {f"network.{name}": value for name, value in exported.items()})  # nothing of the target
    assert (finished / "heatmaps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.situation(43)
def test_a_finished_run_can_be_run_again_with_moved_data_and_changes_nothing(finished):
    names = ("metrics.json", "csv/version_0/metrics.csv")
    before, exported = [(finished / name).read_bytes() for name in names], load_file(finished / "explainer.safetensors")
    train(*RUN, "data_dir=/somewhere/else", folder=finished)
    assert [(finished / name).read_bytes() for name in names] == before
    assert same(load_file(finished / "explainer.safetensors"), exported)


@pytest.mark.slow
def test_another_config_in_the_same_folder_is_refused_and_the_key_is_named(finished):
    with pytest.raises(SystemExit, match=r"explainer\..*hops.*1.* → .*2.*name="):
        train(*RUN, "explainer.hops=[2]", folder=finished)
    assert "- 1\n" in (finished / "config.yaml").read_text()


def test_training_starts_from_a_trained_explainer_and_last_is_the_last_epoch_and_best_the_best(finished, tmp_path):
    """With no learning, what is exported is what was read, and no epoch is better than the first."""
    weights = finished / "explainer.safetensors"
    command = (*TVE_RUN, *DIGITS, f"explainer.weights={weights}", "trainer.max_epochs=2", "module.optimizer.lr=0")
    with pytest.raises(SystemExit, match="misspelt"):  # a start that failed is no run
        train(*command, "+explainer.misspelt=1", folder=tmp_path)
    train(*command, folder=tmp_path)
    assert same(load_file(weights), load_file(tmp_path / "explainer.safetensors"))
    assert [checkpoint(tmp_path, name)["epoch"] for name in ("best", "last")] == [0, 1]


@pytest.fixture
def without_wandb_account(tmp_path, monkeypatch):
    for name in [*(name for name in os.environ if name.startswith("WANDB_")), "WANDB_MODE"]:
        monkeypatch.setenv(name, "")  # or what Lightning sets would outlive the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


@pytest.mark.situation(40)
@pytest.mark.slow
def test_without_a_key_wandb_is_offline_and_a_resumed_run_keeps_its_id(tmp_path, without_wandb_account):
    command = (*TVE_RUN, *DIGITS, "logger=wandb", "trainer.log_every_n_steps=1")
    train(*command, "trainer.max_epochs=1", folder=tmp_path / "run")
    train(*command, "trainer.max_epochs=2", "ckpt_path=last", folder=tmp_path / "run")
    name = (tmp_path / "run/wandb_id").read_text()
    folders = list((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all((folder / f"run-{name}.wandb").stat().st_size > 0 for folder in folders)
    assert "WANDB_MODE" not in os.environ  # it would hold for the later runs of this process


@pytest.mark.parametrize("config", ["train", "eval"])
def test_nothing_is_uploaded_unless_the_user_asks_for_it(config, tmp_path):
    assert list(composed(folder=tmp_path, config=config).logger) == ["csv"]
    assert list(composed("logger=wandb", folder=tmp_path, config=config).logger) == ["csv", "wandb"]
    for path in (ROOT / "configs/experiment").glob("*.yaml"):
        assert "/logger" not in path.read_text()
