"""What a sweep of explainability vectors tests, logs, warns of and refuses."""

import copy
import json
import math
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
import wandb
from commands import csv_rows
from lightning.pytorch.loggers import CSVLogger
from matplotlib.image import imread
from toys import Marked, exported, marked_splits, validate, vector_module

from datamodules.images import Images
from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.running.loggers import wandb_logger
from explainers.saved.identity import weights_hash
from explainers.saved.weights import read_weights
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.training.state_dicts import part
from explainers.vectors import explainability_vector
from explainers.vectors.fixed_head import select_explained
from explainers.vectors.lambda_sweep import curvature, read_point
from explainers.vectors.self_explaining import SelfExplaining
from explainers.vectors.task_arithmetic import cosine, vector

LABELS = partial(ShapleyLabels, budget=20)
MEASURED = {"accuracy", "e_rmse", "relative_error", "iou", "rank_correlation"}


@pytest.fixture
def build(target, grid, three_files):
    return lambda **settings: vector_module(target, grid, three_files, **settings)


def test_a_test_measures_the_model_before_and_after_on_test_images_alone(build):
    module = build(lambda_2=[0.4, 1.0], tolerance=1)
    sets, arguments = marked_splits()
    own = validate(module, data := Images(**arguments))
    chosen = module.best
    sets["val"].read.clear()
    own.test(module, data, verbose=False)
    assert sets["test"].read == list(range(5)) and not sets["val"].read and not sets["train"].read
    assert module.best == chosen
    logged = {name: value.item() for name, value in own.callback_metrics.items()}
    names = (*MEASURED, "kept", "divergence")
    assert logged.keys() == {f"test/{which}/{name}" for which in ("untouched", "transferred") for name in names}
    fresh = build(lambda_2=[0.4, 1.0])
    validate(fresh, Images(val=lambda: Marked(5, seed=2), batch_size=5, num_workers=0))
    rows = {(row["lambda_1"], row["lambda_2"]): row for row in fresh.sweep}
    for which, point in (("untouched", (1.0, 0.0)), ("transferred", chosen)):
        expected = {name: rows[point][name] for name in MEASURED}
        found = {name: logged[f"test/{which}/{name}"] for name in MEASURED}
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_heatmap_is_of_the_best_model(build, images):
    module = build().eval()
    heatmaps = []
    for module.best in ((1.0, 0.0), (1.0, 1.0), (1.0, 0.0)):
        heatmaps.append(module(images))
    assert torch.equal(heatmaps[0], heatmaps[2]) and not torch.allclose(heatmaps[0], heatmaps[1], atol=1e-3)


def test_the_curve_is_a_history_of_csv_rows(build, tmp_path):
    module = build(lambda_2=[1.0, 0.5])
    validate(module, logger=CSVLogger(tmp_path, "csv", version=0))
    rows = [row for row in csv_rows(tmp_path / "csv/version_0/metrics.csv") if row["sweep/lambda_2"]]
    assert [float(row["sweep/lambda_2"]) for row in rows] == [0, 0.5, 1]
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    for row, expected in zip(rows, sorted(module.sweep, key=lambda row: row["lambda_2"]), strict=True):
        logged = {name: float(row[f"sweep/{name}"]) for name in expected}
        assert logged == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_wandb_offline_has_one_table_and_one_figure_with_the_numbers_of_the_csv_file(build, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    csv = CSVLogger(tmp_path, "csv", version=0)
    module = build(lambda_2=0.5)
    validate(module, logger=[csv, wandb_logger("project", "name", str(tmp_path), offline=True)])
    wandb.finish()
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media")
    (table,), (figure,) = media.glob("table/sweep/points*.json"), media.glob("images/sweep/curves*.png")
    assert imread(figure).std() > 0
    logged = json.loads(table.read_text())
    rows = [row for row in csv_rows(tmp_path / "csv/version_0/metrics.csv") if row["sweep/lambda_2"]]
    assert len(rows) == len(logged["data"]) == len(module.sweep)
    for values, row in zip(logged["data"], rows, strict=True):
        point = dict(zip(logged["columns"], values, strict=True))
        expected = {name: float(row[f"sweep/{name}"]) for name in point}
        found = {name: math.nan if value is None else value for name, value in point.items()}
        assert found == pytest.approx(expected, nan_ok=True)
        assert point["chosen"] == (read_point(point) == module.best)
        measured = next(one for one in module.sweep if read_point(one) == read_point(point))
        assert expected["curvature"] == pytest.approx(curvature([measured]), nan_ok=True)


def test_it_warns_where_the_tasks_point_apart_and_not_otherwise(build, target, three_files, monkeypatch):
    backbones = {role: part(read_weights(path)[1], "backbone") for role, path in three_files.items()}
    base = target.backbone.state_dict()
    expected = cosine(vector(backbones["predicting"], base), vector(backbones["onto"], base))
    for value, warned in ((-0.01, True), (0.01, False)):
        monkeypatch.setattr(explainability_vector, "log", log := MagicMock())  # other tests configure loggers
        module = build()
        assert module.cosines == pytest.approx({"cosine": expected})
        module.cosines = {"cosine": value}
        validate(module, limit_val_batches=1)
        told = [call for call in log.warning.call_args_list if "the transfer may hurt" in call.args[0]]
        assert len(told) == warned
        assert module.trainer.callback_metrics["val/cosine"].item() == pytest.approx(value)


def refused(build, told, **settings):
    with pytest.raises(InputError, match=told):
        build(**settings)


def test_swapped_and_transferred_files_are_refused_with_what_they_are(build, three_files, tmp_path):
    files = three_files
    swapped = {"predicting": files["explaining"], "explaining": files["predicting"]}
    refused(build, r"module\.predicting a model trained without .* alpha=0\.8 in .*explaining/.* swapped\?", **swapped)
    refused(build, r"module\.explaining a model trained with .* got alpha=1 in", explaining=files["predicting"])
    refused(build, r"module\.onto a model trained without .* got alpha=0\.8 in", onto=files["explaining"])
    path = str(build().export(tmp_path))
    for role in ("predicting", "explaining", "onto"):
        refused(build, rf"module\.{role} .*{path}", **{role: path})


@pytest.mark.parametrize("role", ["predicting", "explaining", "onto"])
def test_a_model_of_another_kind_or_of_another_base_is_refused_with_both(
    build, make_target, target, grid, tmp_path, role
):
    alpha = 0.8 if role == "explaining" else 1
    resnet, other = make_target("test_resnet"), make_target(seed=1)
    path = exported(resnet, PatchGrid(32, 32), tmp_path / "resnet", alpha=alpha, seed=1)
    refused(build, rf"a vit_tiny_patch16_224 for module\.{role}, got test_resnet in .*resnet/", **{role: path})
    path = exported(other, grid, tmp_path / "other", alpha=alpha, seed=1)
    hashes = weights_hash(target.backbone)[:12], weights_hash(other.backbone)[:12]
    told = rf"module\.{role} a model .* {hashes[0]}\), got one from another base model \({hashes[1]}\)"
    refused(build, told, **{role: path})


def test_a_vector_between_two_tasks_is_refused(build, target, grid, three_files, tmp_path):
    """Its difference would be that of the tasks, and no explanation."""
    for classes, told in ((3, r"head_sha256: \w+ → \w+ between"), (4, r"num_classes: 3 → 4 between")):
        other = exported(target, grid, tmp_path / "other", alpha=0.8, seed=2, classes=classes, turn=1)
        refused(build, rf"of one task with one head, got a difference in {told} .*/other/", explaining=other)
    module = SelfExplaining(copy.deepcopy(target), grid, alpha=0.8, weights=three_files["predicting"])
    module.target.classes = ["cat", "dog", "bird"]
    told = r"got a difference in classes: \[\] → \['cat', 'dog', 'bird'\]"
    refused(build, told, explaining=str(module.export(tmp_path)))


def test_models_of_one_task_may_read_patches_differently(build, target, grid, three_files, tmp_path):
    """As experiment=demo/predicting and the upper bound of demo_source do."""
    base, start = copy.deepcopy(target), three_files["predicting"]
    module = SelfExplaining(base, grid, reading="difference", alpha=0.8, weights=start)
    module.target.head.patch_scale.fill_(0.3)
    transferred = build(explaining=str(module.export(tmp_path)))
    transferred(Marked(2)[torch.arange(2)]["image"])
    head = transferred.model.target.head
    assert (head.reading, head.patch_scale.item()) == ("difference", pytest.approx(0.3))


@pytest.mark.parametrize(
    ("told", "settings"),
    [
        ("labels.classes=all", {"labels": partial(LABELS, classes="all")}),
        (r"expected finite numbers, got .*\[\]", {"lambda_1": []}),
        (r"expected finite numbers, got .*\[\]", {"lambda_2": []}),
        (r"expected finite numbers, got .*\[nan\]", {"lambda_2": [float("nan")]}),
    ],
)
def test_nothing_to_compare_with_or_to_try_is_refused(build, told, settings):
    refused(build, told, **settings)


def test_the_best_factor_is_that_of_the_validation_images_alone(build, tmp_path):
    module, data = build(), Images(**marked_splits()[1])
    own = validate(module, data)
    module.export(tmp_path / "before")
    own.test(module, data, verbose=False)
    own.validate(module, data, verbose=False)
    module.export(tmp_path / "after")
    before, after = (read_weights(tmp_path / name / "scaled.safetensors")[1] for name in ("before", "after"))
    images = Marked(7, seed=1)[torch.arange(7)]
    rows = module.sources[1](images)
    assert torch.equal(before["head.patch_scale"], after["head.patch_scale"])
    module._load((1.0, 0.0))
    attributions = select_explained(module.model.predict_and_explain(images["image"])[1], rows)
    factor = (attributions * rows["shapley"]).sum() / attributions.square().sum()
    expected = module.model.target.head.patch_scale * factor.detach()
    torch.testing.assert_close(after["head.patch_scale"], expected, rtol=1e-4, atol=0)
