"""One command at a time in the folder of a run."""

import os
import time
from pathlib import Path

import pytest
from commands import DIGITS, TVE_RUN
from fork_server import PATIENCE, fork
from forks import forked, wait_for
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from explainers.errors import InputError
from explainers.running import folder as run_folder
from explainers.running.folder import lock_folder

ENDLESS = (*TVE_RUN, *DIGITS, "trainer.max_epochs=100000")


def hold(folder, wait=3600.0):
    with lock_folder(folder):
        (folder / "held").touch()
        time.sleep(wait)


@pytest.fixture
def held(tmp_path):
    """A folder that another process has locked, and that process."""
    process = fork(hold, tmp_path)
    wait_for((tmp_path / "held").exists, "no lock in time")
    yield tmp_path, process
    process.kill()
    process.join()


def free(folder):
    try:
        with lock_folder(folder):
            return True
    except InputError:
        return False


def test_a_second_command_names_the_process_that_has_the_folder(held, monkeypatch):
    folder, process = held
    monkeypatch.setattr(run_folder.socket, "gethostname", lambda: "elsewhere")
    told = rf"{folder} is in use by process {process.pid} on \S+: wait until .*name=\.\.\."
    with pytest.raises(InputError, match=told) as raised, lock_folder(folder):
        pass
    assert "elsewhere" not in str(raised.value)


def test_a_killed_process_leaves_no_lock(held):
    folder, process = held
    assert not free(folder)
    process.kill()
    process.join()
    assert free(folder) and free(folder)


def test_processes_that_the_holder_starts_work_under_its_lock_and_do_not_end_it(tmp_path):
    with lock_folder(tmp_path):
        child = fork(hold, tmp_path, 0.0)
        child.join()
        assert child.exitcode == 0
        stranger = fork(hold_as_stranger, tmp_path)
        stranger.join()
        assert stranger.exitcode != 0
    assert free(tmp_path) and run_folder.LOCKED not in os.environ


def hold_as_stranger(folder):
    del os.environ[run_folder.LOCKED]
    hold(folder, 0.0)


def test_of_processes_that_torchrun_or_slurm_start_only_the_first_needs_the_lock(held, monkeypatch):
    folder, _ = held
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert free(folder)


@pytest.mark.slow
def test_training_and_evaluation_in_the_folder_of_a_running_command_end_with_one_line(tmp_path):
    folder = tmp_path / "run"
    with forked("train.py", *ENDLESS, folder=folder) as process:
        wait_for((folder / "checkpoints/last.ckpt").exists, "no checkpoint in time")
        for command in (("train.py", *ENDLESS), ("eval.py", "experiment=demo/eval", "target=tiny")):
            with forked(*command, folder=folder) as second:
                second.join(PATIENCE)
            assert second.exitcode == 1
            (line,) = Path(f"{folder}.log").read_text().replace("\0", "").splitlines()
            assert line.startswith(f"error: {folder} is in use by process {process.pid} on ")
        assert process.is_alive()
    assert free(folder)
