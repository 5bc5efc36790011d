"""What a training prints and leaves about the fidelity of its explainer."""

import json

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger
from test_callbacks import QUIET
from toys import LIGHT, training

from callbacks.check import Check
from datamodules.cached import Cached
from datamodules.digits import Digits
from datamodules.images import Images
from explainers.errors import InputError
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.evaluation.result import build_baselines
from explainers.posthoc.defaults import DEFAULT_METHODS
from explainers.posthoc.names import label_methods
from explainers.tve import TVE


@pytest.fixture
def data(grid):
    digits = Digits("test", size=6, image_size=grid.image_size)
    return Images(lambda: digits, lambda: digits, lambda: digits, batch_size=3, num_workers=0)


def fit(module, data, folder, **settings):
    options = {**QUIET, "max_epochs": 1} | settings
    trainer = Trainer(callbacks=[Check(str(folder), images=6, levels=4, batch_size=3)], **options)
    trainer.fit(training(module), data)
    return trainer


def test_the_numbers_are_those_of_an_evaluation_and_stand_in_a_table_a_file_and_the_loggers(
    target, grid, data, tmp_path, capsys
):
    tve = TVE(target, grid, LIGHT)
    fit(tve, Cached(data, str(tmp_path / "rows")), tmp_path, logger=CSVLogger(tmp_path, name="csv", version=0))
    record = json.loads((tmp_path / "check.json").read_text())
    assert (record["images"], record["levels"], record["removal"]) == (6, 4, "zero")
    compared = {"TVE": tve, **build_baselines(tve.target, grid)}
    assert list(record["explainers"]) == list(compared) == ["TVE", "DecompX-SkipPLUS", "chance"]
    settings = Evaluation(grid, curves=["fidelity_plus", "fidelity_minus"], levels=4, localization=[])
    measured = EvaluationModule(tve.target, compared, settings)
    Trainer(inference_mode=False, **QUIET).test(measured, data, verbose=False)
    for name, row in record["explainers"].items():
        for key in ("fidelity_plus", "fidelity_minus_error"):
            assert row[key] == pytest.approx(float(measured.results[name][key]), abs=1e-5)
    printed = capsys.readouterr().out
    assert "6 validation images" in printed and f"{record['explainers']['TVE']['fidelity_plus']:.3f} ±" in printed
    assert "check/DecompX-SkipPLUS/fidelity_plus" in (tmp_path / "csv/version_0/metrics.csv").read_text()


@pytest.mark.parametrize(
    ("error", "said"), [(InputError("expected a head"), "expected a head"), (MemoryError("full"), "MemoryError: full")]
)
def test_what_cannot_be_measured_is_said_and_ends_no_training(
    error, said, target, grid, data, tmp_path, capsys, monkeypatch
):
    def refuse(*_):
        raise error

    monkeypatch.setattr("callbacks.check.measure_beside_baselines", refuse)
    trainer = fit(TVE(target, grid, LIGHT), data, tmp_path)
    assert f"check: the fidelity was not measured: {said}" in capsys.readouterr().out
    assert trainer.global_step == 2 and not (tmp_path / "check.json").exists()


def test_another_model_than_a_transformer_stands_beside_a_method_that_explains_it():
    import timm

    from explainers.models import TargetModel

    target = TargetModel(timm.create_model("test_resnet", num_classes=3))
    compared = build_baselines(target, target.grid)
    method, chance = compared
    assert method in label_methods(DEFAULT_METHODS["classes"][1:]) and chance == "chance"
    images = torch.zeros(1, 3, *target.grid.size, dtype=torch.uint8)
    assert compared[method](images, torch.tensor([0])).shape[1:] == target.grid.shape
