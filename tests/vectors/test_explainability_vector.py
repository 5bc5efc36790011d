"""A transfer: what it reads, logs, tests, warns of, refuses and leaves behind."""

import math
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from commands import csv_rows
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from safetensors.torch import load_file
from toys import Marked, exported, marked_splits, validate, vector_module

from datamodules.images import Images
from explainers.saved.weights import part, read_weights
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.vectors import Selection, SelfExplaining, VectorSources, explainability_vector
from explainers.vectors.lambda_sweep import UNCHANGED, Point
from explainers.vectors.model_files import exported_target
from explainers.vectors.task_arithmetic import cosine, subtract, transfer


@pytest.fixture
def build(target, grid, three_files):
    return partial(vector_module, target, grid, three_files)


@pytest.fixture
def sources(three_files):
    return VectorSources([three_files["explaining"]], [three_files["predicting"]])


def backbone(path):
    return part(read_weights(path)[1], "backbone")


def test_a_sweep_reads_every_image_once_and_changes_one_model_in_place(build, monkeypatch):
    """Labels computed in the step: they are of the model that nothing is added to, whatever λ₂."""
    sets, arguments = marked_splits()
    labelled = []
    call = ShapleyLabels.__call__
    monkeypatch.setattr(ShapleyLabels, "__call__", lambda *a: labelled.extend(a[1]["index"].tolist()) or call(*a))
    module = build()
    before = [id(weight) for weight in module.sweep.explainer.parameters()]
    validate(module, Images(**arguments))
    assert sets["val"].read == list(range(7)) == labelled and not sets["train"].read and not sets["test"].read
    assert [id(weight) for weight in module.sweep.explainer.parameters()] == before


def test_a_test_measures_the_model_before_and_after_on_test_images_alone(build, tmp_path):
    module = build(lambda_2=[0.4, 1.0], selection=Selection(tolerance=1, k=3))
    sets, arguments = marked_splits()
    own = validate(module, data := Images(**arguments))
    chosen, scales = module.best, []
    sets["val"].read.clear()
    module.export(tmp_path)
    scales.append(load_file(tmp_path / "scaled.safetensors")["head.patch_scale"])
    own.test(module, data, verbose=False)
    module.export(tmp_path)
    scales.append(load_file(tmp_path / "scaled.safetensors")["head.patch_scale"])
    assert sets["test"].read == list(range(5)) and not sets["val"].read and not sets["train"].read
    assert module.best == chosen and torch.equal(*scales)
    fresh = build(lambda_2=[0.4, 1.0])
    validate(fresh, Images(val=lambda: Marked(5, seed=2), batch_size=5, num_workers=0))
    rows = {(row["lambda_1"], row["lambda_2"]): row for row in fresh.rows}
    wanted = {"untouched": rows[UNCHANGED], "transferred": rows[chosen]}
    expected = {f"test/{which}/{name}": value for which, row in wanted.items() for name, value in row.items()}
    assert {n: value.item() for n, value in own.callback_metrics.items()} == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_where_nothing_is_better_a_test_measures_the_unchanged_model_once(build):
    module = build(lambda_2=0)
    own = validate(module, data := Images(**marked_splits()[1]))
    own.test(module, data, verbose=False)
    logged = {name.removeprefix("test/"): value.item() for name, value in own.callback_metrics.items()}
    assert all(
        logged[name.replace("untouched", "transferred")] == logged[name] for name in logged if "untouched" in name
    )


def test_what_is_exported_is_the_transfer_bit_for_bit(build, target, three_files, images, tmp_path):
    module = build()
    module.best = Point(1.0, 0.7)
    path = module.export(tmp_path)
    weights = {role: backbone(file) for role, file in three_files.items()}
    tau = subtract(weights["explaining"], weights["predicting"])
    expected = transfer(target.backbone.state_dict(), weights["onto"], tau, 1.0, 0.7)
    for saved, wanted in ((backbone(path), expected), (load_file(tmp_path / "vector.safetensors"), tau)):
        assert saved.keys() == wanted.keys()
        assert all(saved[name].numpy().tobytes() == wanted[name].numpy().tobytes() for name in wanted)
    identity = read_weights(path)[0]
    hashes = {role: read_weights(file)[0]["target"]["backbone_sha256"] for role, file in three_files.items()}
    hashes["base"] = identity["base_sha256"]
    assert {role: identity[f"{role}_sha256"] for role in hashes} == hashes
    assert {role: read_weights(tmp_path / "vector.safetensors")[0][role] for role in hashes} == hashes
    assert [identity[name] for name in ("lambda_1", "lambda_2", "alpha")] == [1.0, 0.7, "transferred"]
    with torch.no_grad():
        expected = exported_target(target, path)(images).argmax(-1)
        assert torch.equal(module.sweep.load(module.best).logits(images).argmax(-1), expected)


@pytest.mark.slow
def test_a_sum_of_vectors_is_computed_measured_and_exported(build, target, grid, three_files, tmp_path):
    """θ_base + λ₁ (θ_onto − θ_base) + λ₂ Σ_m r_m τ_m, with the base model as one source's predicting model."""
    other = exported(target, grid, tmp_path / "second", alpha=0.8, seed=5, classes=4, turn=1)
    sources = VectorSources([three_files["explaining"], other], [three_files["predicting"], None], [1.0, -0.5])
    module = build(vector=sources, lambda_1=0.7, lambda_2=[0.0, 0.4])
    metrics = validate(module).callback_metrics
    assert "val/cosine_1" in metrics and "val/cosine_2" not in metrics  # without a predicting model
    module.best = Point(0.7, 0.4)
    found = backbone(module.export(tmp_path))
    base, onto = target.backbone.state_dict(), backbone(three_files["onto"])
    explaining, predicting, second = (
        backbone(each) for each in (*sources.explaining[:1], sources.predicting[0], other)
    )
    for name, value in found.items():
        tau = explaining[name] - predicting[name] - 0.5 * (second[name] - base[name])
        expected = base[name] + 0.7 * (onto[name] - base[name]) + 0.4 * tau
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    identity = read_weights(tmp_path / "model.safetensors")[0]
    roles = ("base", "predicting_1", "explaining_1", "explaining_2", "onto")
    assert len({identity[f"{role}_sha256"] for role in roles}) == 5 and "predicting_2_sha256" not in identity


def test_the_curve_is_in_csv_rows_and_in_a_table_and_a_figure_of_wandb(build, tmp_path):
    csv, board = CSVLogger(tmp_path, "csv", version=0), MagicMock(spec=WandbLogger)
    module = build(lambda_2=[1.0, 0.5])
    validate(module, logger=[csv, board])
    (_, (figure,)), table = board.log_image.call_args.args, board.log_table.call_args.kwargs
    ordered = sorted(module.rows, key=lambda row: row["lambda_2"])
    rows = [row for row in csv_rows(tmp_path / "csv/version_0/metrics.csv") if row["sweep/lambda_2"]]
    assert figure.axes and [float(row["sweep/lambda_2"]) for row in rows] == [0, 0.5, 1]
    for values, row, measured in zip(table["data"], rows, ordered, strict=True):
        point = dict(zip(table["columns"], values, strict=True))
        expected = {name: float(row[f"sweep/{name}"]) for name in point}
        found = {name: math.nan if value is None else value for name, value in point.items()}
        assert found == pytest.approx(expected, nan_ok=True)
        assert {name: expected[name] for name in measured} == pytest.approx(measured, abs=1e-6)
        assert point["chosen"] == (point["lambda_2"] == module.best[1])


def test_it_warns_where_the_tasks_point_apart_and_not_otherwise(build, target, three_files, monkeypatch):
    base = target.backbone.state_dict()
    expected = cosine(*(subtract(backbone(three_files[role]), base) for role in ("predicting", "onto")))
    for value, warned in ((-0.01, True), (0.01, False)):
        monkeypatch.setattr(explainability_vector, "log", log := MagicMock())  # other tests configure loggers
        module = build()
        assert module.vector.cosines == pytest.approx({"cosine": expected})
        module.vector = replace(module.vector, cosines={"cosine": value})
        validate(module, limit_val_batches=1)
        told = [call for call in log.warning.call_args_list if "the transfer may hurt" in call.args[0]]
        assert len(told) == warned
        assert module.trainer.callback_metrics["val/cosine"].item() == pytest.approx(value)


def test_patches_are_read_as_the_sources_do_which_read_alike(build, target, grid, sources, tmp_path):
    module = SelfExplaining(target, grid, sources.predicting[0])
    module.target.head = module.target.head.read_as("difference", 0.3)
    other = str(module.export(tmp_path, alpha=0.8))
    head = build(vector=replace(sources, explaining=[other])).sweep.explainer.target.head
    assert (head.reading, head.patch_scale.item()) == ("difference", pytest.approx(0.3))
