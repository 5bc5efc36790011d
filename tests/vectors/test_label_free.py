"""A transfer without labels and without KernelSHAP: heatmaps of a method as the reference, and the curvature."""

import math
from functools import partial

import pytest
import torch
from torch.func import functional_call, hessian
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import Marked, validate, vector_module

from datamodules.images import Images
from explainers.posthoc import build as build_method
from explainers.saved.weights import read_weights
from explainers.training.state_dicts import part
from explainers.vectors import MethodLabels
from explainers.vectors.lambda_sweep import curvature
from explainers.vectors.model_files import exported_target
from explainers.vectors.task_arithmetic import vector

METHOD = partial(MethodLabels, method="DecompX-PLUS")


class Unlabelled(Marked):
    """Without classes, as `unlabelled_images`."""

    classes = ()

    def __getitem__(self, index):
        return super().__getitem__(index) | {"label": torch.full_like(torch.as_tensor(index), -1)}


def swept(target, grid, files, **settings):
    module = vector_module(target, grid, files, labels=METHOD, lambda_2=[0.0, 0.01, 0.5, 1.0], **settings)
    validate(module, Images(val=lambda: Unlabelled(6, seed=1), batch_size=4, num_workers=0))
    return module


def test_the_reference_is_the_heatmap_of_the_predicted_class(target, grid, three_files, images):
    model = exported_target(target, three_files["onto"])
    labels = METHOD(model, grid)
    with torch.no_grad():
        rows = labels({"image": images})
        predicted = model(images).argmax(-1)
    expected = build_method("DecompX-PLUS", model, grid)(images, predicted).flatten(1)
    assert torch.equal(rows["explained"], predicted)
    torch.testing.assert_close(rows["shapley"], expected)
    assert labels.forward_passes == 2 and MethodLabels(model, grid, "RISE").forward_passes == 4001  # and the prediction
    assert set(rows) == set(labels.provides) and labels.key()["source"] == "heatmaps by DecompX-PLUS"


@pytest.mark.slow
def test_a_point_is_chosen_without_labels_and_keeps_the_predictions(target, grid, three_files):
    module = swept(target, grid, three_files, select="rank_correlation", tolerance=0.1)
    assert math.isnan(module.sweep[0]["accuracy"]) and module.sweep[0]["kept"] == 1
    assert module.sweep[0]["divergence"] == 0 and module.sweep[-1]["divergence"] > 0
    allowed = [row for row in module.sweep if row["kept"] >= 0.9]
    best = max(allowed, key=lambda row: row["rank_correlation"])
    assert module.best == (best["lambda_1"], best["lambda_2"])


@pytest.mark.slow
def test_the_curvature_is_the_second_derivative_of_the_divergence(target, grid, three_files):
    module = swept(target, grid, three_files)
    model = exported_target(target, three_files["onto"])
    backbones = {role: part(read_weights(path)[1], "backbone") for role, path in three_files.items()}
    tau = vector(backbones["explaining"], backbones["predicting"])
    images = model.normalise(Unlabelled(6, seed=1)[torch.arange(6)]["image"])
    before = model.classify(model.backbone(images)).log_softmax(-1).detach()
    start = {name: value.detach() for name, value in model.backbone.named_parameters()}

    def divergence(step):
        moved = {name: value + step * tau[name] for name, value in start.items()}
        after = model.classify(functional_call(model.backbone, moved, (images,))).log_softmax(-1)
        return (before.exp() * (before - after)).sum(-1).mean()

    with sdpa_kernel(SDPBackend.MATH):  # the only attention with second derivatives
        expected = hessian(divergence)(torch.zeros(())).item()
    assert expected > 0
    assert curvature(module.sweep) == pytest.approx(expected, rel=0.05)  # at a step of 0.01, in float32
    assert module.trainer.callback_metrics["val/curvature"].item() == pytest.approx(expected, rel=0.05)
    assert math.isnan(curvature(module.sweep[:1]))
