"""The sweep of λ₁ and λ₂, what it chooses, and what it leaves behind."""

import math
from functools import partial

import pytest
import references
import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr
from toys import Marked, marked_splits, validate, vector_module

from datamodules.cached import Cached, StoredRows
from datamodules.images import Images
from explainers.saved.identity import weights_hash
from explainers.saved.weights import read_weights
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.training.state_dicts import part
from explainers.vectors.lambda_sweep import best_point, summary
from explainers.vectors.model_files import exported_target
from explainers.vectors.task_arithmetic import transfer, vector

LABELS = partial(ShapleyLabels, budget=20)
SWEEP = [0.0, 0.3, 0.7, 1.0, 2.0]
MEASURED = ("accuracy", "e_rmse", "iou", "rank_correlation")


@pytest.fixture
def build(target, grid, three_files):
    return partial(vector_module, target, grid, three_files)


@pytest.fixture
def weights(three_files):
    """The backbones in the three_files."""
    return {role: part(read_weights(path)[1], "backbone") for role, path in three_files.items()}


def measured(model, images, labels, grid, k=3):
    """Accuracy, E-RMSE, IoU@K and rank correlation of a model's attributions, one image after the other."""
    rows = {"accuracy": [], "e_rmse": [], "iou": [], "rank_correlation": []}
    for index in range(len(images)):
        sample = images[torch.tensor([index])]
        shapley = labels(sample)["shapley"][0].tolist()
        embeddings, patches = model.embed_with_patches(model.normalise(sample["image"]))
        label = sample["label"].item()
        units = patches[0] / patches[0].norm(dim=-1, keepdim=True)
        phi = (units @ model.head.weight[label]).tolist()
        rows["accuracy"].append(model.classify(embeddings).argmax().item() == label)
        rows["e_rmse"] += [(a - b) ** 2 for a, b in zip(phi, shapley, strict=True)]
        one, other = references.top(phi, k), references.top(shapley, k)
        rows["iou"].append(len(one & other) / len(one | other))
        rows["rank_correlation"].append(spearmanr(phi, shapley).statistic)
    means = {name: sum(values) / len(values) for name, values in rows.items()}
    return means | {"e_rmse": means["e_rmse"] ** 0.5}


@pytest.fixture
def models(target, three_files, weights):
    """The onto model, moved by hand."""

    def moved(one, two):
        model = exported_target(target, three_files["onto"])
        difference = vector(weights["explaining"], weights["predicting"])
        state = transfer(target.backbone.state_dict(), weights["onto"], difference, one, two)
        model.backbone.load_state_dict(state)
        return model

    return moved


def test_a_sweep_reads_every_image_once_and_changes_one_model_in_place(build, monkeypatch):
    """Labels computed in the step: they are of the model that nothing is added to, whatever λ₂."""
    sets, arguments = marked_splits()
    labelled = []
    call = ShapleyLabels.__call__
    monkeypatch.setattr(ShapleyLabels, "__call__", lambda *a: labelled.extend(a[1]["index"].tolist()) or call(*a))
    module = build(lambda_2=SWEEP)
    backbone = [id(weight) for weight in module.model.target.backbone.parameters()]
    validate(module, Images(**arguments))
    assert sets["val"].read == list(range(7)) == labelled and not sets["train"].read and not sets["test"].read
    assert [id(weight) for weight in module.model.target.backbone.parameters()] == backbone
    assert [row["lambda_2"] for row in module.sweep] == SWEEP


@pytest.mark.slow
def test_with_labels_on_disk_a_sweep_reads_every_row_once_and_no_image(build, tmp_path, monkeypatch):
    sets, arguments = marked_splits()
    validate(build(lambda_2=[1.0]), Cached(Images(**arguments), str(tmp_path / "rows"), 4))
    assert sets["val"].read == 2 * list(range(7))  # for the pixels, and for the labels
    sets["val"].read.clear()
    rows, own = [], StoredRows.__getitem__
    monkeypatch.setattr(StoredRows, "__getitem__", lambda self, index: rows.append(index) or own(self, index))
    module, computed = build(lambda_2=SWEEP), build(lambda_2=SWEEP)
    validate(module, Cached(Images(**arguments), str(tmp_path / "rows"), 4))
    assert rows == list(range(7)) and not sets["val"].read
    validate(computed)
    for row, expected in zip(module.sweep, computed.sweep, strict=True):
        assert row == pytest.approx(expected, abs=2e-3)  # the labels are kept in half precision


@pytest.mark.slow
@torch.no_grad()
def test_every_row_is_what_a_model_of_those_weights_measures(build, target, three_files, grid, models):
    module = build(lambda_1=[1.0, 0.7], lambda_2=[0.0, 0.6, 1.3])
    validate(module)
    images, labels = Marked(7, seed=1), LABELS(exported_target(target, three_files["onto"]), grid)
    assert [(row["lambda_1"], row["lambda_2"]) for row in module.sweep] == [
        (one, two) for one in (1.0, 0.7) for two in (0.0, 0.6, 1.3)
    ]
    for row in module.sweep:
        expected = measured(models(row["lambda_1"], row["lambda_2"]), images, labels, grid)
        assert {name: row[name] for name in MEASURED} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    untouched = measured(exported_target(target, three_files["onto"]), images, labels, grid)
    assert {name: module.sweep[0][name] for name in MEASURED} == pytest.approx(untouched, rel=1e-5, abs=1e-5)
    assert len({row["e_rmse"] for row in module.sweep}) == 6


def sweep(accuracies, values):
    """A sweep of λ₂ = 0, 1, 2, ..., with these results."""
    return [
        {"accuracy": accuracy, "e_rmse": value, "iou": value, "rank_correlation": value}
        for accuracy, value in zip(accuracies, values, strict=True)
    ]


@pytest.mark.parametrize(
    ("select", "accuracies", "values", "best"),
    [
        ("e_rmse", [0.9, 0.9, 0.9, 0.9], [0.5, 0.4, 0.2, 0.3], 2),
        ("iou", [0.9, 0.9, 0.9, 0.9], [0.5, 0.6, 0.2, 0.3], 1),
        ("rank_correlation", [0.9, 0.9, 0.9, 0.9], [-0.5, 0.6, 0.2, 0.7], 3),
        ("e_rmse", [0.9, 0.85, 0.7, 0.9], [0.5, 0.4, 0.2, 0.3], 3),
        ("e_rmse", [0.9, 0.85, 0.7, 0.7], [0.5, 0.4, 0.2, 0.3], 1),
        ("e_rmse", [0.9, 0.1, 0.1, 0.1], [0.5, 0.4, 0.2, 0.3], 0),
        ("e_rmse", [0.1, 0.9, 0.9, 0.9], [0.5, 0.6, 0.4, 0.7], 2),
        ("e_rmse", [0.9, 0.9, 0.9, 0.9], [0.5, 0.2, 0.2, 0.3], 1),
        ("iou", [0.9, 0.9, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5], 0),
        ("e_rmse", [0.9, 0.9, 0.9, 0.9], [0.5, 0.6, 0.7, 0.8], 0),
    ],
)
def test_the_best_is_the_best_of_those_that_predict_well_enough(select, accuracies, values, best):
    rows = sweep(accuracies, values)
    assert best_point(rows, 0.1, select) is rows[best]


def test_the_tolerance_itself_is_allowed():
    rows = sweep(torch.tensor([0.5, 0.48]).tolist(), [0.5, 0.4])
    assert best_point(rows, 0.02, "e_rmse") is rows[1]


def test_without_labels_the_predictions_are_kept():
    rows = [
        {"accuracy": math.nan, "kept": kept, "lambda_1": 1.0, "lambda_2": 1 - kept, "iou": 1 - kept}
        for kept in (1.0, 0.99, 0.9)
    ]
    assert best_point(rows, 0.02, "iou") is rows[1]
    assert summary(rows, rows[1], "iou").endswith("kept 1 → 0.99, iou 0 → 0.01")


def test_images_without_a_label_do_not_count_in_the_accuracy_of_a_point(build):
    module = build(lambda_2=[1.0], labels=partial(ShapleyLabels, budget=20, classes="predicted"))
    batch = marked_splits()[0]["val"][torch.arange(7)]
    module._measure(batch, module.points[:1])
    known = module._metrics(module.points[0]).result()[0]["accuracy"]
    unlabelled = {name: torch.cat([value, value]) for name, value in batch.items()}
    unlabelled["label"] = torch.cat([batch["label"], torch.full((7,), -1)])
    module._measure(unlabelled, module.points[:1])
    assert module._metrics(module.points[0]).result()[0]["accuracy"] == pytest.approx(known) and known > 0


def test_what_is_exported_is_the_transfer_bit_for_bit(build, target, three_files, weights, models, images, tmp_path):
    module = build(lambda_2=[0.7])
    validate(module)
    module.best = (1.0, 0.7)
    folder = tmp_path / "run"
    folder.mkdir()
    path = module.export(folder)
    difference = vector(weights["explaining"], weights["predicting"])
    expected = transfer(target.backbone.state_dict(), weights["onto"], difference, 1.0, 0.7)
    for saved, wanted in (
        (part(load_file(path), "backbone"), expected),
        (load_file(folder / "vector.safetensors"), difference),
    ):
        assert saved.keys() == wanted.keys()
        assert all(saved[name].numpy().tobytes() == wanted[name].numpy().tobytes() for name in wanted)
    assert torch.equal(exported_target(target, path)(images), models(1.0, 0.7)(images))
    identity = read_weights(path)[0]
    hashes = {
        f"{role}_sha256": weights_hash(exported_target(target, path).backbone) for role, path in three_files.items()
    }
    told = {"base_sha256": weights_hash(target.backbone), "lambda_1": 1.0, "lambda_2": 0.7, "alpha": "transferred"}
    assert hashes | told == {key: identity[key] for key in hashes | told}
    assert identity["target"]["backbone_sha256"] == weights_hash(models(1.0, 0.7).backbone)
    of_vector = read_weights(folder / "vector.safetensors")[0]
    assert of_vector["predicting"] == hashes["predicting_sha256"] and of_vector["base"] == weights_hash(target.backbone)
