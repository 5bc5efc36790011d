"""Several processes, on the CPU: the same numbers as one, one folder for a run, one sweep for a sweep, and no hang."""

import json
import signal
import subprocess
import time

import pytest
import torch
from commands import QUIET, composed, evaluate, run, running, start, stop, train
from lightning import Callback
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from explainers import runs

TVE_RUN = ("target=tiny", "data=digits", "explainer=tve_light", "explainer.network.width=24", "logger=csv", *QUIET)
SIZES = ("data.train.size=32", "data.val.size=7", "data.test.size=7")
TWO = ("trainer.devices=2", "trainer.strategy=ddp")


class Losses(Callback):
    """Writes down the training loss of every step, of this process."""

    def __init__(self, folder):
        self.folder, self.losses = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer, pl_module):
        with open(f"{self.folder}/losses_{trainer.global_rank}.json", "w") as file:
            json.dump(self.losses, file)


class Bomb(Callback):
    """Fails in the second epoch, in the last process only, while the others go on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 1 and trainer.global_rank == trainer.world_size - 1:
            raise RuntimeError(f"the bomb went off in process {trainer.global_rank} of {trainer.world_size}")


def losses(folder):
    """Of every step, the mean of all processes."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("losses_*.json"))]
    return torch.tensor(ranks).mean(0), len(ranks)


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """The folders of the same run in one process and in two."""
    root = tmp_path_factory.mktemp("processes")
    one, two = root / "one", root / "two"
    record = [f"+callbacks.losses={{_target_: test_processes.Losses, folder: {folder}}}" for folder in (one, two)]
    common = (*TVE_RUN, *SIZES, "trainer.max_epochs=2", "explainer.patches_per_image=2")
    train(*common, "data.batch_size=8", record[0], folder=one)
    code, _, errors = run("train.py", *common, *TWO, "data.batch_size=4", record[1], folder=two)
    assert code == 0, errors
    return one, two


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_same_global_batch(one_and_two):
    (expected, _), (got, ranks) = map(losses, one_and_two)
    assert ranks == 2 and len(got) == 8
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    expected, got = (load_file(folder / "explainer.safetensors") for folder in one_and_two)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert [path.name for path in (one_and_two[1] / "csv").iterdir()] == ["version_0"]


@pytest.mark.slow
def test_two_processes_validate_as_one_though_seven_images_cannot_be_halved(one_and_two):
    one, two = (json.loads((folder / "metrics.json").read_text())["val/loss"] for folder in one_and_two)
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_two_processes_measure_as_one_though_seven_images_cannot_be_halved(tmp_path):
    torch.manual_seed(0)
    save_file({"weight": torch.randn(2, 48), "bias": torch.zeros(2)}, tmp_path / "head.safetensors")
    tasks = ("odd", "five_or_more", "loop")
    command = [
        *("experiment=quickstart_eval", "target=tiny", "evaluation.levels=3", "~explainers.tve", *QUIET),
        "explainers.tve_untrained.network.width=24",
        *(f"tasks.{task}.head={tmp_path / 'head.safetensors'}" for task in tasks),
        *(f"tasks.{task}.data.test.size=7" for task in tasks),
        *(f"tasks.{task}.data.batch_size=2" for task in tasks),
    ]
    evaluate(*command, folder=tmp_path / "one")
    code, _, errors = run("eval.py", *command, *TWO, folder=tmp_path / "two")
    assert code == 0, errors
    found = []
    for name in ("one", "two"):
        results = json.loads((tmp_path / name / "results.json").read_text())["results"]
        found.append({(task, who): numbers for task, row in results.items() for who, numbers in row.items()})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 3 * 3
    for key, expected in found[0].items():
        assert found[1][key]["images"] == expected["images"] == 7
        for name in expected.keys() - {"images_per_second"}:
            assert found[1][key][name] == pytest.approx(expected[name], abs=1e-5), (key, name)


@pytest.mark.slow
def test_a_sweep_with_two_processes_makes_one_folder_of_runs(tmp_path):
    sweep = tmp_path / "sweep"
    overrides = (*TVE_RUN, *SIZES, *TWO, "data.batch_size=8", "explainer.seed=0,1", f"hydra.sweep.dir={sweep}")
    code, _, errors = run(["train.py", "-m"], *overrides, folder=tmp_path / "unused", timeout=240)
    assert code == 0, errors
    folders = sorted(path.parent for path in sweep.rglob("metrics.json"))
    assert len(folders) == 2 and sorted(path for path in sweep.iterdir() if path.is_dir()) == folders
    assert all("explainer.seed=" in folder.name for folder in folders)
    seeds = [OmegaConf.load(folder / "config.yaml").explainer.seed for folder in folders]
    assert seeds == [0, 1]
    assert not (tmp_path / "unused").exists()
    values = [json.loads((folder / "metrics.json").read_text())["val/loss"] for folder in folders]
    assert values[0] != values[1]


@pytest.mark.slow
def test_torchrun_trains_too_and_a_run_of_which_one_process_fails_ends(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    bomb = ("trainer.max_epochs=2", "data.batch_size=8", "+callbacks.bomb._target_=test_processes.Bomb")
    code, _, errors = run(torchrun, *TVE_RUN, *SIZES, *TWO, *bomb, folder=tmp_path, timeout=120)
    assert code not in (0, None) and "the bomb went off in process 1 of 2" in errors
    assert (tmp_path / "checkpoints/last.ckpt").exists()  # of the first epoch
    assert not (tmp_path / "explainer.safetensors").exists()


class Failed:
    """What Popen gives for a torchrun of which a process failed."""

    def wait(self):
        return 3


@pytest.mark.parametrize(("mode", "ending"), [("RUN", SystemExit), ("MULTIRUN", RuntimeError)])
def test_a_failure_ends_the_command_with_its_code_or_the_job_of_a_sweep(mode, ending, tmp_path, monkeypatch):
    for name in ("LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_: Failed())
    composed(*TVE_RUN, f"hydra.mode={mode}", folder=tmp_path)
    with pytest.raises(ending) as raised:
        runs.launch(2)
    assert mode == "MULTIRUN" or raised.value.code == 3


@pytest.mark.slow
def test_ending_the_command_ends_its_processes(tmp_path):
    """SIGTERM, as a scheduler sends it, reaches the command only."""
    endless = ("trainer.max_epochs=100000",)
    process = start("train.py", *TVE_RUN, *SIZES, *TWO, *endless, "data.batch_size=4", folder=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "checkpoints/last.ckpt").exists() and process.poll() is None:
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.1)
        assert len(running(tmp_path)) >= 4  # the command, torchrun and two that train
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0
        while running(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not running(tmp_path)
    finally:
        stop(process, tmp_path)


SLURM = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}


@pytest.mark.parametrize("environment", [SLURM, {"LOCAL_RANK": "1"}])
def test_a_process_that_was_started_as_one_of_many_starts_no_others(environment, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_: pytest.fail("started another process"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not runs.launch(2)


def test_the_only_task_of_a_slurm_job_trains(tmp_path, monkeypatch):
    for name, value in {**SLURM, "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NODELIST": "here"}.items():
        monkeypatch.setenv(name, value)
    assert train(*TVE_RUN, *SIZES, folder=tmp_path) > 0


@pytest.mark.parametrize(
    ("overrides", "processes"),
    [((), 1), (("trainer.devices=3",), 3), (("trainer.devices=[0,2]",), 2), (("trainer.devices=auto",), 1)],
)
def test_there_is_a_process_for_each_device(overrides, processes, tmp_path):
    cfg = composed(*TVE_RUN, *overrides, folder=tmp_path)
    assert runs.number_of_processes(cfg.trainer) == processes


def test_the_folder_of_a_job_has_a_name_that_every_file_system_takes():
    assert runs.folder_name("seed=1,data.root=/a/b") == "seed=1,data.root=_a_b"
    names = {runs.folder_name(f"{'x' * 300}{i}") for i in range(3)}
    assert len(names) == 3 and max(map(len, names)) <= 200
