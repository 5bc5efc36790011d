"""Several processes, on the CPU: the same numbers as one, one folder for a run, one sweep for a sweep, and no hang.

A process takes far longer to import than to train these few images. So one sweep serves several tests, and torchrun
and the processes that it starts are forks.
"""

import json
import re
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from commands import DIGITS, QUIET, TVE_RUN, composed, evaluate, train
from fork_server import PATIENCE
from forks import Forks, Started, Torchrun, forked, run_program, wait_for
from hydra.errors import CompactHydraException
from lightning import Callback
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from explainers.report.pictures import read_pictures
from explainers.running import processes
from explainers.running.trainer import read_progress

RUN = (*TVE_RUN, *DIGITS, "data.size.val=7")
TWO = ("trainer.devices=2", "trainer.strategy=ddp")


class Losses(Callback):
    """Writes down the training loss of every step, of this process."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer, pl_module):
        with open(f"{trainer.default_root_dir}/losses_{trainer.global_rank}.json", "w") as file:
            json.dump(self.losses, file)


class Bomb(Callback):
    """Fails in the second epoch of the run of seed 1, in the last process only, while the others go on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        last = trainer.global_rank == trainer.world_size - 1
        if pl_module.loss.seed == 1 and trainer.current_epoch == 1 and last:
            raise RuntimeError(f"the bomb went off in process {trainer.global_rank} of {trainer.world_size}")


def losses(folder):
    """Of every step, the mean of all processes."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("losses_*.json"))]
    return torch.tensor(ranks).mean(0), len(ranks)


def stand_in():
    processes.subprocess = SimpleNamespace(Popen=Torchrun)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a run in one process; and of a sweep of two, of which the first fails and the second is the same
    run, its folder, its exit code and what its processes printed.
    """
    root = tmp_path_factory.mktemp("processes")
    common = (*RUN, "trainer.max_epochs=2", "module.loss.patches_per_image=2")
    common += tuple(f"+callbacks.{name}._target_=test_processes.{name}" for name in ("Losses", "Bomb"))
    train(*common, "module.loss.seed=0", folder=root / "one")
    sweep = ("-m", *common, "module.loss.seed=1,0", f"hydra.sweep.dir={root / 'sweep'}", *TWO, "data.batch_size=4")
    with forked("train.py", *sweep, folder=root / "unused", prepare=stand_in) as process:
        process.join(PATIENCE)
    return root / "one", root / "sweep", process.exitcode, (root / "unused.log").read_text()


def runs_by_seed(sweep):
    """The folders in a sweep's folder."""
    folders = [path for path in sweep.iterdir() if path.is_dir()]
    return sorted((OmegaConf.load(folder / "config.yaml").module.loss.seed, folder) for folder in folders)


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_same_global_batch(swept):
    """And validate as one, though seven images cannot be halved."""
    folders = swept[0], dict(runs_by_seed(swept[1]))[0]
    (expected, _), (got, ranks) = map(losses, folders)
    assert ranks == 2 and len(got) == 4
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    expected, got = (load_file(folder / "explainer.safetensors") for folder in folders)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert [path.name for path in (folders[1] / "csv").iterdir()] == ["version_0"]
    one, two = (json.loads((folder / "metrics.json").read_text()) for folder in folders)
    measured = {name for name in one if name.startswith("val/")}
    assert measured >= {"val/loss", "val/theorem1_covered"}
    for name in measured:
        assert two[name] == pytest.approx(one[name], rel=1e-4, nan_ok=True), name


@pytest.mark.slow
def test_a_run_of_which_one_process_fails_ends_and_the_sweep_goes_on(swept):
    _, sweep, code, printed = swept
    assert code not in (0, None) and "the bomb went off in process 1 of 2" in printed
    (_, whole), (_, failed) = runs_by_seed(sweep)
    assert [folder.name for folder in (whole, failed)] == ["run,module.loss.seed=0", "run,module.loss.seed=1"]
    assert f"the job in {failed} failed; its error is printed above" in printed
    assert (failed / "checkpoints/last.ckpt").exists()  # of the first epoch
    for name in ("explainer.safetensors", "metrics.json"):
        assert (whole / name).exists() and not (failed / name).exists()


@pytest.mark.slow
def test_two_processes_measure_as_one_though_seven_images_cannot_be_halved(tmp_path, monkeypatch):
    torch.manual_seed(0)
    save_file({"weight": torch.randn(2, 48), "bias": torch.zeros(2)}, tmp_path / "head.safetensors")
    command = [
        *("experiment=demo/eval", "target=tiny", "evaluation.levels=3", "~tasks.loop", "~tasks.five_or_more", *QUIET),
        *("~explainers.tve", "~explainers.anyhead", "~explainers.tve_untrained", "~figures", "pictures.images=3"),
        "evaluation.probes=[saco,road]",
        "evaluation.localization=[pointing_game,average_precision,segmentation]",
        f"tasks.odd.target.head={tmp_path / 'head.safetensors'}",
        *("tasks.odd.data.size.test=7", "tasks.odd.data.batch_size=2"),
    ]
    evaluate(*command, folder=tmp_path / "one")
    in_two = partial(evaluate, *command, *TWO, folder=tmp_path / "two")
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=partial(Forks, in_two)))
    in_two()
    rows = []
    for name in ("one", "two"):
        results = json.loads((tmp_path / name / "results.json").read_text())["results"]
        rows.append({(task, who): numbers for task, row in results.items() for who, numbers in row.items()})
    assert rows[0].keys() == rows[1].keys() and len(rows[0]) == 2
    for key, expected in rows[0].items():
        assert rows[1][key]["images"] == expected["images"] == 7
        for name in expected.keys() - {"images_per_second"}:
            assert rows[1][key][name] == pytest.approx(expected[name], abs=1e-5), (key, name)
    of_images = [load_file(tmp_path / name / "results_scores.safetensors") for name in ("one", "two")]
    torch.testing.assert_close(of_images[1], of_images[0], atol=1e-5, rtol=1e-4)
    assert of_images[0]["odd/index"].tolist() == list(range(7)) and len(of_images[0]["odd/oracle/saco"]) == 7
    keys = json.loads((tmp_path / "one/results.json").read_text())["rows"]["odd"]
    one, two = (read_pictures(tmp_path / name, "odd", keys) for name in ("one", "two"))
    assert [picture.name for picture in one] == [picture.name for picture in two] == ["image 0", "image 3", "image 6"]
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first.image, second.image) and first.classes.keys() == second.classes.keys()


class Failed:
    """What Popen gives for a torchrun of which a process failed."""

    def wait(self):
        return 3


@pytest.mark.parametrize(("mode", "ending"), [("RUN", SystemExit), ("MULTIRUN", CompactHydraException)])
def test_a_failure_ends_the_command_with_its_code_or_the_job_of_a_sweep(mode, ending, tmp_path, monkeypatch):
    for name in ("LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Failed())
    composed(*RUN, f"hydra.mode={mode}", "hydra.job.num=0", folder=tmp_path)
    with pytest.raises(ending) as raised:
        processes.launch(OmegaConf.create({"devices": 2, "precision": "32-true"}))
    assert mode == "MULTIRUN" or raised.value.code == 3


@pytest.mark.slow
def test_ending_the_command_ends_its_processes_which_save_their_last_step(tmp_path):
    """SIGTERM, as a scheduler sends it, reaches the command only."""
    endless = (*RUN, *TWO, "trainer.max_epochs=100000", "data.batch_size=4")
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    command = Started(partial(run_program, "train.py", endless, tmp_path / "run"), tmp_path / "log", stand_in)
    try:
        wait_for(lambda: checkpoint.exists() or not command.process.is_alive(), "no checkpoint in time")
        assert len(command.left()) == 4  # the command, torchrun and two that train
        command.process.terminate()
        wait_for(lambda: not command.left(), "processes are left")
    finally:
        code, output = command.end(0)
    saved = re.search(r"SIGTERM: saved step (\d+), from which the same command resumes", output)
    assert code not in (0, None) and saved and int(saved[1]) == read_progress(checkpoint)[0]
