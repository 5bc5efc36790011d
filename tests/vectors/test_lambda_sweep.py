"""The sweep of λ₂: what it measures, restores and chooses."""

import math
from functools import partial

import pytest
import references
import torch
from scipy.stats import spearmanr
from torch.func import functional_call, hessian
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import Marked, Unlabelled, validate, vector_module

from datamodules.images import Images
from explainers.posthoc import build as build_method
from explainers.saved.weights import part, read_weights
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.vectors.explainability_vector import Selection
from explainers.vectors.lambda_sweep import best_row, curvature, summary
from explainers.vectors.method_labels import MethodLabels
from explainers.vectors.model_files import exported_target
from explainers.vectors.task_arithmetic import restoration, subtract, transfer

METHOD = partial(MethodLabels, method="DecompX-PLUS")


@pytest.fixture
def build(target, grid, three_files):
    return partial(vector_module, target, grid, three_files)


@pytest.fixture
def weights(three_files):
    """The backbones in the three files."""
    return {role: part(read_weights(path)[1], "backbone") for role, path in three_files.items()}


def measured(model, images, labels, k=3):
    """Accuracy, E-RMSE, best factor, IoU@K and rank correlation of a model's attributions, one image at a time."""
    rows = {"accuracy": [], "e_rmse": [], "iou": [], "rank_correlation": []}
    products, squares = 0, 0
    for index in range(len(images)):
        sample = images[torch.tensor([index])]
        shapley = labels(sample)["shapley"][0].tolist()
        embeddings, patches = model.embed_with_patches(model.normalise(sample["image"]))
        label = sample["label"].item()
        phi = (patches[0] / patches[0].norm(dim=-1, keepdim=True) @ model.head.weight[label]).tolist()
        rows["accuracy"].append(model.classify(embeddings).argmax().item() == label)
        rows["e_rmse"] += [(a - b) ** 2 for a, b in zip(phi, shapley, strict=True)]
        products += sum(a * b for a, b in zip(phi, shapley, strict=True))
        squares += sum(a * a for a in phi)
        one, other = references.top(phi, k), references.top(shapley, k)
        rows["iou"].append(len(one & other) / len(one | other))
        rows["rank_correlation"].append(spearmanr(phi, shapley).statistic)
    means = {name: sum(values) / len(values) for name, values in rows.items()}
    return means | {"e_rmse": means["e_rmse"] ** 0.5, "best_factor": products / squares}


@pytest.mark.slow
@torch.no_grad()
def test_every_row_is_what_a_model_of_those_weights_measures(build, target, three_files, grid, weights):
    module = build(lambda_1=0.7, lambda_2=[0.0, 0.6, 1.3])
    validate(module)
    images = Marked(7, seed=1)
    labels = ShapleyLabels(exported_target(target, three_files["onto"]), grid, budget=20)
    points = dict.fromkeys([(1.0, 0.0), *((0.7, two) for two in (0.0, 0.6, 1.3))])
    assert [(row["lambda_1"], row["lambda_2"]) for row in module.rows] == [*points]
    for row, (one, two) in zip(module.rows, points, strict=True):
        model, tau = (
            exported_target(target, three_files["onto"]),
            subtract(weights["explaining"], weights["predicting"]),
        )
        model.backbone.load_state_dict(transfer(target.backbone.state_dict(), weights["onto"], tau, one, two))
        expected = measured(model, images, labels)
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert len({row["e_rmse"] for row in module.rows}) == len(points)


@pytest.mark.parametrize(
    ("select", "accuracies", "values", "best"),
    [
        ("e_rmse", [0.9, 0.9, 0.9, 0.9], [0.5, 0.4, 0.2, 0.3], 2),
        ("iou", [0.9, 0.9, 0.9, 0.9], [0.5, 0.6, 0.2, 0.3], 1),
        ("rank_correlation", [0.9, 0.9, 0.9, 0.9], [-0.5, 0.6, 0.2, 0.7], 3),
        ("e_rmse", [0.9, 0.85, 0.7, 0.9], [0.5, 0.4, 0.2, 0.3], 3),
        ("e_rmse", [0.9, 0.8, 0.7, 0.7], [0.5, 0.4, 0.2, 0.3], 1),  # the tolerance itself is allowed
        ("e_rmse", [0.9, 0.1, 0.1, 0.1], [0.5, 0.4, 0.2, 0.3], 0),
    ],
)
def test_the_best_is_the_best_of_those_that_predict_well_enough(select, accuracies, values, best):
    rows = [{"accuracy": a, select: value} for a, value in zip(torch.tensor(accuracies).tolist(), values, strict=True)]
    assert best_row(rows, 0.1, select) is rows[best]


def test_the_reference_without_labels_is_the_heatmap_of_the_predicted_class(target, grid, three_files, images):
    model = exported_target(target, three_files["onto"])
    labels = METHOD(model, grid)
    with torch.no_grad():
        rows, predicted = labels({"image": images}), model(images).argmax(-1)
    assert torch.equal(rows["explained"], predicted) and set(rows) == set(labels.provides)
    torch.testing.assert_close(rows["shapley"], build_method("DecompX-PLUS", model, grid)(images, predicted).flatten(1))
    assert labels.forward_passes == 2 and MethodLabels(model, grid, "RISE").forward_passes == 4001  # and the prediction
    assert labels.key()["source"] == "heatmaps by DecompX-PLUS"


@pytest.mark.slow
def test_without_labels_predictions_are_kept_and_the_curvature_is_their_second_derivative(
    build, target, weights, three_files
):
    values = [0.0, 0.01, 0.5, 1.0]
    module = build(labels=METHOD, lambda_2=values, selection=Selection("rank_correlation", tolerance=0.1, k=3))
    validate(module, Images(val=lambda: Unlabelled(6, seed=1), batch_size=4, num_workers=0))
    first, last = module.rows[0], module.rows[-1]
    assert math.isnan(first["accuracy"]) and first["kept"] == 1 and first["divergence"] == 0 < last["divergence"]
    allowed = [row for row in module.rows if row["kept"] >= 0.9]
    best = max(allowed, key=lambda row: row["rank_correlation"])
    assert module.best == (1, best["lambda_2"]) and "; kept 1 → " in summary(module.rows, best, "iou")

    model, tau = exported_target(target, three_files["onto"]), subtract(weights["explaining"], weights["predicting"])
    images = model.normalise(Unlabelled(6, seed=1)[torch.arange(6)]["image"])
    before = model.classify(model.backbone(images)).log_softmax(-1).detach()
    start = {name: value.detach() for name, value in model.backbone.named_parameters()}

    def divergence(step):
        moved = {name: value + step * tau[name] for name, value in start.items()}
        after = model.classify(functional_call(model.backbone, moved, (images,))).log_softmax(-1)
        return (before.exp() * (before - after)).sum(-1).mean()

    with sdpa_kernel(SDPBackend.MATH):  # the only attention with second derivatives
        expected = hessian(divergence)(torch.zeros(())).item()
    assert expected > 0  # and measured at a step of 0.01, in float32
    assert module.trainer.callback_metrics["val/curvature"].item() == pytest.approx(expected, rel=0.05)
    assert math.isnan(curvature(module.rows[:1]))


def test_the_restoration_is_a_least_squares_fit_with_one_more_row_for_each_entry():
    ridge = 1.0
    unchanged = torch.randn(40, 6).double() + 2
    changed = unchanged @ (torch.eye(6) + 0.2 * torch.randn(6, 6)).double() + 0.1 * torch.randn(40, 6)
    root = (ridge * ((changed - changed.mean(0)) ** 2).sum() / 6) ** 0.5
    rows, wanted = (torch.cat([each, root * torch.eye(6)]) for each in (changed, unchanged))
    expected = torch.linalg.lstsq(rows, wanted).solution.mT
    torch.testing.assert_close(restoration(changed, unchanged, ridge), expected)


@pytest.mark.slow
def test_a_sweep_restores_every_point_but_the_unchanged_one_and_exports_the_best(build, target, three_files, tmp_path):
    plain, module = (build(restore=count, lambda_2=[0.0, 0.5, 2.0]) for count in (0, 4))
    for each in (plain, module):
        validate(each)
    assert list(module.sweep.restorations) == module.sweep.points[1:] and not plain.sweep.restorations
    assert module.rows[0] == plain.rows[0]
    for one, other in zip(module.rows[1:], plain.rows[1:], strict=True):
        assert one["divergence"] < other["divergence"]
    module.best = module.sweep.points[2]
    transferred = exported_target(target, module.export(tmp_path))
    assert read_weights(tmp_path / "model.safetensors")[0]["restore"] == 4
    images = Marked(4, seed=8)[torch.arange(4)]["image"]  # the training images
    unchanged = exported_target(target, three_files["onto"])
    with torch.no_grad():
        before, after = (each.embed(each.normalise(images)) for each in (unchanged, transferred))
        expected = unchanged.head(after @ restoration(after, before).mT)
        torch.testing.assert_close(transferred(images), expected, rtol=1e-4, atol=1e-4)
