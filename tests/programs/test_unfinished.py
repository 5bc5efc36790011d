"""A killed test resumes where it was, and measures the same as an uninterrupted one."""

import re

import pytest
import torch
from devices import on_device, refusing_to_mix
from lightning import Callback, Trainer
from toys import SILENT

from callbacks.resume_test import ResumeTest
from datamodules.digits import Digits
from datamodules.images import Images
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.posthoc.baselines import Chance
from explainers.report.pictures import Pictures, read_pictures


class Killed(Exception):
    pass


class Kill(Callback):
    """Raises an error after some batches, in place of a kill."""

    def __init__(self, after, kind):
        self.after, self.kind = after, kind

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if batch_idx + 1 == self.after:
            raise self.kind


class Counted(Chance):
    calls = 0

    def forward(self, images, classes):
        Counted.calls += 1
        return super().forward(images, classes)


@pytest.fixture
def run(tmp_path, make_target, grid):
    target, samples = make_target(num_classes=10), Digits("test", size=10, image_size=32)

    def measure(folder, key="a", after=None, seconds=0.0, device=None, kind=Killed):
        explainers = {"chance": Counted(None, grid), "other": Chance(None, grid, seed=1)}
        settings = {"curves": ["fidelity_plus", "deletion_accuracy"], "levels": 4, "reference": "other"}
        evaluation = EvaluationModule(target, explainers, Evaluation(grid, probes=["saco"], **settings))
        unfinished = ResumeTest(tmp_path / folder / "unfinished", "digit", key, seconds)
        kill = [Kill(after, kind)] if after else []
        callbacks = [Pictures(str(tmp_path / folder), "digit", images=5), unfinished, *kill]
        trainer = Trainer(inference_mode=False, callbacks=callbacks, **SILENT, **(device or {"accelerator": "cpu"}))
        data = Images(test=lambda: samples, batch_size=3, num_workers=0)
        Counted.calls = 0
        try:
            trainer.test(evaluation, data, verbose=False)
        except (Killed, SystemExit):
            return None
        unfinished.remove()
        return evaluation

    return measure


def without_speed(evaluation):
    rows = evaluation.results.items()
    numbers = {name: {k: v for k, v in row.items() if k != "images_per_second"} for name, row in rows}
    scores = evaluation.scores
    return numbers, scores.index.tolist(), {name: scores.rows[name]["saco"].tolist() for name in scores.rows}


@pytest.mark.slow
def test_a_killed_test_resumes_and_measures_the_same(run, tmp_path, capsys):
    """On a device that refuses tensors of another one."""
    with refusing_to_mix():
        whole = run("whole", device=on_device())
        assert run("killed", after=2, device=on_device()) is None
        assert len(list((tmp_path / "killed" / "unfinished").iterdir())) == 1
        resumed = run("killed", device=on_device())
    assert Counted.calls == 4 - 2 and "digit: resumes after 2 measured batches" in capsys.readouterr().out
    assert without_speed(resumed) == without_speed(whole)
    assert not list((tmp_path / "killed" / "unfinished").iterdir())
    pictures = [
        read_pictures(tmp_path / folder, "digit", {"chance": "", "other": ""}) for folder in ("whole", "killed")
    ]
    for one, other in zip(*pictures, strict=True):
        assert one.name == other.name and torch.equal(one.image, other.image) and one.classes == other.classes
        assert one.heatmaps["chance"].keys() == other.heatmaps["chance"].keys()


def test_a_file_of_other_settings_is_not_read_which_is_said(run, capsys):
    run("other", after=2)
    run("other", key="b")
    assert Counted.calls == 4
    line = r"digit: measured from the start: the 2 batches in \S+/digit_0_of_1.pt are of other images or settings\n"
    assert re.search(line, capsys.readouterr().out)


def test_a_test_that_a_signal_ends_saves_all_whole_batches(run, tmp_path, capsys):
    whole = run("whole")
    run("early", after=2, seconds=1000)
    assert not (tmp_path / "early" / "unfinished").exists()  # before its time
    run("early", after=2, seconds=1000, kind=SystemExit)
    assert "digit: saved 2 of 4 measured batches" in capsys.readouterr().out
    assert without_speed(run("early")) == without_speed(whole) and Counted.calls == 2
