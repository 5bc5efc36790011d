"""Processes that torchrun or SLURM start on several machines. Here all machines are this one, and no SLURM is there."""

import json
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import DIGITS, ROOT, TVE_RUN, train
from fork_server import PATIENCE
from forks import Started, act_as_torchrun, free_port, run_program, wait_for
from lightning import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import OmegaConf
from safetensors.torch import load_file
from test_processes import losses

from explainers.errors import InputError
from explainers.running import processes
from explainers.running.trainer import read_progress

RUN = (
    *(*TVE_RUN, *DIGITS, "data.size.val=7", "trainer.max_epochs=3", "module.loss.patches_per_image=2"),
    *("module.min_crop=null", "+callbacks.losses._target_=test_processes.Losses"),
)
STEPS, HELD = 6, 2
"""Steps of the run, of which an epoch has two; and those after which it may be held."""
HOLD = ("+callbacks.hold._target_=test_nodes.Hold",)


class Hold(Callback):
    """Holds a run at the begin of its second epoch, so that a signal reaches it there, until a file lets it go on."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == HELD:
            wait_for(Path(trainer.default_root_dir, "go").exists, "held for ever")


def on_node(number, port, command, place, devices):
    """`torchrun` on one of two machines."""
    os.chdir(ROOT)
    where = ("--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}")
    nodes = ("trainer.num_nodes=2", f"trainer.devices={devices}", "trainer.strategy=ddp")
    act_as_torchrun(*where, f"--nproc-per-node={devices}", *command, *nodes, f"hydra.run.dir={place}/run")


@pytest.fixture
def nodes():
    """Starts a run on two machines; nothing of it is left after the test."""
    started = []

    def start(*command, places, devices=1):
        port = free_port()
        for number, place in enumerate(places):
            work = partial(on_node, number, port, (*command, f"data.batch_size={4 // devices}"), place, devices)
            started.append(Started(work, place / f"{number}.log"))
        return started[-2:]

    yield start
    for launcher in started:
        with suppress(OSError):  # a test has closed its output
            launcher.kill()


def check_equal_weights(folder, other):
    first, second = (load_file(path / "explainer.safetensors") for path in (folder, other))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(*RUN, folder=folder)
    return folder


@pytest.mark.slow
def test_two_machines_of_two_processes_train_as_one_process_with_as_many_images_in_a_step(nodes, tmp_path):
    """Each of the four processes computes its share of the stored rows."""
    train(*RUN, "cache=sources", f"cache_dir={tmp_path}/one", folder=tmp_path / "whole")
    stored = ("cache=sources", f"cache_dir={tmp_path}/two")
    for launcher in nodes("train.py", *RUN, *stored, places=[tmp_path] * 2, devices=2):
        code, output = launcher.end()
        assert code == 0, output
    (expected, _), (got, ranks) = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert ranks == 4 and len(got) == STEPS
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    check_equal_weights(tmp_path / "run", tmp_path / "whole")
    one, two = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "run"))
    assert two["val/loss"] == pytest.approx(one["val/loss"], rel=1e-4)


@pytest.mark.slow
def test_a_killed_launcher_ends_all_others_and_one_process_goes_on_where_they_were(nodes, uninterrupted, tmp_path):
    """The processes of the killed launcher are told by Linux. All save what they have, at the same step."""
    first, second = nodes("train.py", *RUN, *HOLD, places=[tmp_path] * 2)
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    wait_for(checkpoint.exists, "no checkpoint in time")
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.join(PATIENCE)  # by then, Linux has told its processes
    (tmp_path / "run/go").touch()
    wait_for(lambda: not first.left() and not second.left(), "processes are left")
    second.process.join(PATIENCE)  # its exit code may come a moment after its end
    assert second.process.exitcode not in (0, None)
    assert read_progress(checkpoint)[0] == HELD + 1 and not (tmp_path / "run/explainer.safetensors").exists()
    train(*RUN, *HOLD, folder=tmp_path / "run")  # as many images in a step
    check_equal_weights(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_machines_that_share_no_folder_are_refused_before_anything_is_computed(nodes, tmp_path):
    places = [tmp_path / name for name in ("here", "there")]
    for place in places:
        place.mkdir()
    for launcher, place in zip(nodes("train.py", *RUN, places=places), places, strict=True):
        code, output = launcher.end()
        assert code != 0 and f"error: expected a folder that all machines share, got {place}/run" in output
        assert not (place / "run/checkpoints").exists()


SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "here", "MASTER_ADDR": "127.0.0.1"}


def task(rank, count, port, place, *overrides):
    """A task of a job, one of `count` on as many machines; `scontrol` writes down what it is asked."""
    told = {"SLURM_NTASKS": count, "SLURM_NNODES": count, "SLURM_NTASKS_PER_NODE": 1, "SLURM_LOCALID": 0}
    told |= {"SLURM_PROCID": rank, "SLURM_NODEID": rank, "MASTER_PORT": port} | SLURM
    told["PATH"] = f"{place}:{os.environ['PATH']}"

    scontrol = place / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {place}/asked\n')
    scontrol.chmod(0o755)
    work = partial(run_program, "train.py", (*RUN, *overrides), place / "run")
    return Started(work, place / f"{rank}.log", partial(be_task, told, rank))


def be_task(environment, rank):
    os.environ.update({name: str(value) for name, value in environment.items()})
    rank_zero_only.rank = rank  # Lightning asks the environment when it is imported


@pytest.mark.slow
def test_a_job_that_slurm_warns_saves_is_put_into_the_queue_again_and_goes_on(uninterrupted, tmp_path):
    """Two tasks on two machines; `srun` sends SIGUSR1 to both."""
    machines = ("trainer.num_nodes=2", "trainer.strategy=ddp", "data.batch_size=4", *HOLD)
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    port = free_port()
    tasks = [task(rank, 2, port, tmp_path, *machines) for rank in range(2)]
    wait_for(checkpoint.exists, "no checkpoint in time")
    for started in tasks:
        os.kill(started.process.pid, signal.SIGUSR1)
    (tmp_path / "run/go").touch()
    codes, outputs = zip(*(started.end() for started in tasks), strict=True)
    assert codes == (128 + signal.SIGUSR1,) * 2, outputs
    assert "SIGUSR1: saved step" in outputs[0] and "SIGUSR1" not in outputs[1]
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert read_progress(checkpoint)[0] == HELD + 1
    for started in [task(rank, 2, port, tmp_path, *machines) for rank in range(2)]:
        code, output = started.end()
        assert code == 0, output
    check_equal_weights(tmp_path / "run", uninterrupted)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}
ONE = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}


@pytest.mark.parametrize(("environment", "count"), [(ONE, 1), ({"LOCAL_RANK": "1"}, 2)])
def test_a_process_that_was_started_as_one_of_many_starts_no_others(environment, count, monkeypatch):
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("started another process"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not processes.launch(OmegaConf.create({"devices": count, "precision": "32-true"}))


def test_a_single_task_with_several_devices_starts_its_processes_itself(monkeypatch):
    for name, value in ONE.items():
        monkeypatch.setenv(name, value)
    assert not processes.is_launched({"devices": 4})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "trainer.num_nodes"),
        (TORCHRUN, "`devices=1` and `num_nodes=3`"),
        (ONE | {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "2"}, "`devices=2`"),
        (ONE, "trainer.num_nodes"),
    ],
)
def test_another_number_of_processes_than_that_of_the_config_is_refused(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        processes.is_launched({"devices": 1, "num_nodes": 3})
