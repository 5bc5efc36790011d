"""What a resumed run continues, and when it refuses to: its history, schedule, files and folder."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import DIGITS, NO_PICTURES, QUIET, TVE_RUN, composed, csv_rows, train
from test_errors import error

from explainers.errors import InputError
from explainers.running.record import hash_model_files, start_record
from explainers.saved.weights import read_weights, save_weights

RUN = (*TVE_RUN, *DIGITS, "trainer.log_every_n_steps=1")
HISTORY = "csv/version_0/metrics.csv"


def epochs(count):
    return f"trainer.max_epochs={count}"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run after its first epoch."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    train(*RUN, epochs(1), folder=folder)
    return folder


@pytest.fixture
def run(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.mark.slow
def test_the_history_of_a_resumed_run_is_one_file_like_that_of_a_whole_run(run, tmp_path):
    """After a kill in the middle of the next epoch, which leaves rows that are logged again."""
    train(*RUN, epochs(2), folder=tmp_path / "whole")
    first = (run / HISTORY).read_text()
    (run / HISTORY).write_text(f"{first}1,,2,0.9,,,,,\r\n,0.001,3,,,,,,\r\n", newline="")
    train(*RUN, epochs(2), "ckpt_path=last", folder=run)
    assert (run / HISTORY).read_text().startswith(first)
    assert [path.name for path in (run / "csv").iterdir()] == ["version_0"]
    resumed, straight = csv_rows(run / HISTORY), csv_rows(tmp_path / "whole" / HISTORY)
    assert resumed[0].keys() == straight[0].keys()
    resumed, straight = ([{name for name, cell in row.items() if cell} for row in rows] for rows in (resumed, straight))
    assert resumed == straight


def test_a_run_that_trains_nothing_is_not_overwritten_by_another(tmp_path):
    """It leaves no checkpoints, as an explainability vector does not."""
    (tmp_path / "metrics.json").write_text("{}")
    start = partial(start_record, folder=tmp_path, may_differ=False)
    start(composed(*RUN, folder=tmp_path))
    start(composed(*RUN, folder=tmp_path))
    with pytest.raises(InputError, match="holds a run of another config: seed: 0 → 1: "):
        start(composed(*RUN, "seed=1", folder=tmp_path))


def test_loggers_progress_processes_and_length_are_no_part_of_what_a_run_is(tmp_path):
    (tmp_path / "metrics.json").write_text("{}")
    processes = ("trainer.devices=2", "data.batch_size=4", "data.num_workers=1", "trainer.accelerator=auto")
    longer = ("logger=wandb", epochs(5), "trainer.max_steps=7", *processes)
    for changes in ((), longer, (), ("~logger", "callbacks.learning_rate=null", "callbacks.progress=null"), ()):
        start_record(composed(*RUN, *changes, folder=tmp_path), tmp_path, may_differ=False)


def test_fewer_epochs_than_a_run_has_done_are_refused(run):
    train(*RUN, epochs(2), "ckpt_path=last", folder=run)
    assert "trainer.max_epochs=2 or more" in error(train, *RUN, epochs(1), "ckpt_path=last", folder=run)


def test_a_file_that_is_no_checkpoint_of_a_run_is_named(run):
    torch.save({"weight": torch.zeros(3)}, run / "model.pth")
    (run / "torn.ckpt").write_bytes((run / "checkpoints/last.ckpt").read_bytes()[:1000])
    for name in ("model.pth", "torn.ckpt"):
        assert f"{run}/{name}: " in error(train, *RUN, epochs(1), f"ckpt_path={run}/{name}", folder=run)


@pytest.mark.slow
def test_weights_that_were_replaced_since_the_run_began_are_refused(stopped, tmp_path):
    weights, folder = tmp_path / "weights.safetensors", tmp_path / "run"
    shutil.copy(stopped / "explainer.safetensors", weights)
    command = (*RUN, f"explainer.weights={weights}")
    train(*command, epochs(1), folder=folder)
    weights.touch()
    train(*command, epochs(1), folder=folder)
    shutil.copy(folder / "explainer.safetensors", weights)
    message = error(train, *command, epochs(1), folder=folder)
    replaced = rf"explainer\.weights: {weights} \(SHA-256 \w{{12}} → \w{{12}}\): "
    assert re.search(rf"{replaced}.*name=.*ckpt_path=last", message)
    train(*command, epochs(2), "ckpt_path=last", folder=folder)
    train(*command, epochs(2), folder=folder)


@pytest.mark.parametrize("key", ["target.head", "explainer.target.head", "module.network.mae", "explainer.heads.1"])
def test_files_of_models_are_recorded_wherever_the_config_names_them(key, tmp_path):
    paths = [str(tmp_path / name) for name in ("mine", "other")]
    Path(paths[0]).write_text("weights")
    config = {"data": {"root": paths[0]}, "cache_dir": paths[0]}
    *parents, last = key.split(".")
    node = config
    for name in parents:
        node = node.setdefault(name, {})
    node[last] = paths[0]
    if key.endswith("1"):
        config["explainer"]["heads"] = [paths[1], paths[0]]
    assert list(hash_model_files(config, tmp_path / "run")) == [key]
    assert not hash_model_files(config, tmp_path)  # the run itself has written it


@pytest.mark.slow
def test_a_replaced_teacher_is_refused_even_with_ckpt_path(tmp_path):
    """Its hash is in the checkpoint, because the attributions that are learned are the teacher's."""
    tiny = ("target=tiny", "grid.patch_size=16", "++grid.differs=true", "logger=csv", *QUIET)
    sizes = ("data.size.train=8", "data.size.val=4", "data.batch_size=4", f"cache_dir={tmp_path}", NO_PICTURES)
    run, start = tmp_path / "run", tmp_path / "start.safetensors"
    train("experiment=demo/predicting", *tiny, *sizes, epochs(1), folder=tmp_path / "predicting")
    shutil.copy(tmp_path / "predicting/model.safetensors", start)
    learns = (
        *("experiment=demo/source", "data.domain=plain", "data.without=null"),
        *tiny,
        *sizes,
        "module.loss.pairs=2",
        "cache=none",
    )
    command = (*learns, f"explainer.weights={start}")
    train(*command, epochs(1), folder=run)
    identity, weights = read_weights(start)
    save_weights(weights | {"backbone.norm.bias": weights["backbone.norm.bias"] + 1}, start, identity)
    assert f"explainer.weights: {start}" in error(train, *command, epochs(1), folder=run)
    assert "teacher_sha256" in error(train, *command, epochs(2), "ckpt_path=last", folder=run)
