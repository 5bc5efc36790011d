"""A run that is interrupted inside an epoch ends exactly as one that is not, also on another number of processes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from commands import DIGITS, TVE_RUN, csv_rows, draw_images, train
from forks import Forks
from lightning import Callback
from safetensors.torch import load_file

from callbacks.last_checkpoint import LastCheckpoint
from datamodules.write_beton import write_beton
from explainers.images.transform import ImageTransform
from explainers.running import processes
from explainers.running.trainer import read_progress

EPOCHS, STEPS = 2, 4  # steps of an epoch
RUN = (
    *(*TVE_RUN, "cache=none", "module.loss.patches_per_image=2", "module.min_crop=0.5"),
    *(f"trainer.max_epochs={EPOCHS}", "trainer.log_every_n_steps=1", "callbacks.last.minutes=1000"),
)
TORCH = (*RUN, *DIGITS, f"data.size.train={8 * STEPS + 2}")


class Killed(BaseException):
    """Stands in for a kill: no handler of the run catches it."""


class Kill(Callback):
    """Makes a checkpoint due after one step of a run, and kills the run before another step."""

    saved = killed = None  # set by `killed`: as settings, Hydra would compose each run anew

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        (last,) = (callback for callback in trainer.callbacks if isinstance(callback, LastCheckpoint))
        last.saved = float("-inf") if trainer.global_step + 1 == self.saved else float("inf")
        if trainer.global_step == self.killed:
            raise Killed


def killed(*command, saved, step, folder):
    """Kill a run before a step; it has a checkpoint of the step `saved` or of the end of an epoch."""
    Kill.saved, Kill.killed = saved, step
    with pytest.raises(Killed):
        train(*command, "+callbacks.kill._target_=test_mid_epoch.Kill", folder=folder)


def results(folder):
    """The trained weights and the history of a run."""
    rows = csv_rows(folder / "csv/version_0/metrics.csv")
    return load_file(folder / "explainer.safetensors"), [row | {"throughput/images_per_second": ""} for row in rows]


@pytest.fixture
def beton(tmp_path):
    """Images from a .beton file, as overrides; FFCV without Numba, which would compile each loader again."""
    compiler = pytest.importorskip("ffcv.pipeline.compiler", reason="FFCV is not installed: make ffcv").Compiler
    draw_images(tmp_path / "images", count=8 * STEPS + 2)
    write_beton(tmp_path / "images", tmp_path / "images.beton", ImageTransform((64, 64)), workers=1)
    compiler.set_enabled(False)
    yield ("data=imagenet", *(f"data.{split}={tmp_path}/images.beton" for split in ("train", "val")))
    compiler.set_enabled(True)


KILLS = ((2, 3), (4, 4), (6, 7))
"""(Step of the last checkpoint, step before which the run is killed): inside an epoch and at its end, with and without
lost steps; each run resumes from the checkpoint of the one before it."""


def check_kills(command, whole, tmp_path, kills=KILLS):
    for saved, step in kills:
        killed(*command, saved=saved, step=step, folder=tmp_path / "run")
        assert read_progress(tmp_path / "run/checkpoints/last.ckpt")[0] == saved
    train(*command, "ckpt_path=last", folder=tmp_path / "run")
    (expected, history), (weights, resumed) = results(whole), results(tmp_path / "run")
    assert resumed == history and weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    train(*TORCH, folder=folder)
    return folder


@pytest.mark.slow
def test_kills_all_over_the_epochs_change_no_bit(whole, tmp_path):
    check_kills(TORCH, whole, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Numba's finalisers
def test_kills_all_over_the_epochs_change_no_bit_with_ffcv(beton, tmp_path):
    command = (*RUN, *beton, "data.batch_size=8", "data.num_workers=1")
    train(*command, folder=tmp_path / "whole")
    check_kills(command, tmp_path / "whole", tmp_path, KILLS[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "division",
    [
        ("trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=4"),
        ("trainer.accumulate_grad_batches=4", "data.batch_size=2"),
    ],
)
def test_as_many_images_in_a_step_give_the_same_results(division, whole, tmp_path, monkeypatch):
    """Half of the run in one process with one batch in a step, the other half otherwise, without being asked twice."""
    folder = tmp_path / "run"
    killed(*TORCH, saved=5, step=6, folder=folder)
    resumed = partial(train, *TORCH, *division, "ckpt_path=last", folder=folder)
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=partial(Forks, resumed)))
    resumed()
    weights, expected = (results(path)[0] for path in (folder, whole))
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-5)
