"""Metrics of Quantus whose definitions coincide with ours, on the same models, images and heatmaps."""

import numpy as np
import pytest
import torch
from torch import nn

from explainers.evaluation import Evaluation
from explainers.evaluation.sweep import Sweep
from explainers.masking import PatchGrid, masked_forward
from explainers.metrics.curves import QUANTITIES
from explainers.metrics.perturbation import PerturbationCurves, importance_order, perturbation_sweep
from explainers.share.adapters import to_pixels

quantus = pytest.importorskip("quantus", reason="Quantus is not installed: make peers")

PLAIN = {"normalise": False, "perturb_baseline": 0.0, "disable_warnings": True}
"""Heatmaps as they are; removed pixels become 0 after normalisation, and Quantus says nothing."""


class Classifier(nn.Module):
    """The target as Quantus wants a model: normalised images to logits."""

    def __init__(self, target):
        super().__init__()
        self.target = target

    def forward(self, normalised):
        return self.target.classify(self.target.embed(normalised))


class Toy(nn.Module):
    """A model of images of one channel and 8 × 8 pixels in which the pixels need one another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 12), nn.Linear(12, 5)

    def forward(self, images):
        return self.second((3 * self.first(images.flatten(1))).tanh())


@pytest.fixture
def toy():
    """A toy model, 3 images and the classes to explain."""
    return Toy().eval().requires_grad_(False), torch.randn(3, 1, 8, 8), torch.tensor([4, 0, 2])


@pytest.mark.parametrize(("quantity", "softmax"), [("probability", True), ("logit", False)])
def test_removed_and_preserved_patches_are_region_perturbation_in_both_orders(target, grid, images, quantity, softmax):
    normalised, heatmaps, classes = target.normalise(images), torch.randn(5, 4, 4), torch.tensor([4, 0, 2, 1, 1])
    sweep, index = Sweep(target, Evaluation(grid, levels=17)), torch.arange(5)
    with torch.no_grad():
        whole = target(images)
        ends = torch.stack([whole, sweep.empty(normalised).expand_as(whole)], 1)
        outputs = sweep(normalised, heatmaps, index, classes, classes, ends)
    removed, preserved = outputs[:, QUANTITIES.index(quantity)].numpy().transpose(1, 0, 2)  # (5, 17) each

    given = normalised.numpy(), classes.numpy(), to_pixels(heatmaps, (32, 32)).numpy()
    drops = {}
    for order in ("morf", "lerf"):
        metric = quantus.RegionPerturbation(patch_size=8, order=order, regions_evaluation=16, **PLAIN)
        drops[order] = np.stack(metric(Classifier(target).eval(), *given, softmax=softmax, device="cpu"))
    np.testing.assert_allclose(drops["morf"], removed[:, :1] - removed[:, 1:], atol=1e-5)
    np.testing.assert_allclose(drops["lerf"], preserved[:, -1:] - preserved[:, -2::-1], atol=1e-5)
    assert min(drops["morf"].std(), drops["lerf"].std(), (drops["morf"] - drops["lerf"]).std()) > 0.01

    if quantity == "probability":
        metric = PerturbationCurves(16, ["aopc"], levels=17)
        metric.update(outputs)
        # AOPC is the mean over all levels; Quantus leaves out the drop of the whole image, which is 0
        assert metric.compute()["aopc"].item() == pytest.approx(drops["morf"].sum(1).mean() / 17, abs=1e-6)


def test_deletion_is_selectivity_and_pixel_flipping_of_one_channel(toy):
    model, images, classes = toy
    grid, heatmaps = PatchGrid(8, 2), torch.randn(3, 4, 4)
    order = importance_order(heatmaps.flatten(1), torch.arange(3))
    outputs = perturbation_sweep(lambda keep: masked_forward(model, images, keep, grid), order, classes, levels=17)
    deletion = outputs[:, QUANTITIES.index("probability"), 0, 1:].numpy()  # without the whole image

    given = images.numpy(), classes.numpy(), to_pixels(heatmaps, (8, 8)).numpy()
    selectivity = quantus.Selectivity(patch_size=2, **PLAIN)
    flipping = quantus.PixelFlipping(features_in_step=4, **PLAIN)  # a patch in a step
    for metric in (selectivity, flipping):
        np.testing.assert_allclose(np.stack(metric(model, *given, softmax=True, device="cpu")), deletion, atol=1e-6)
    assert deletion.std() > 0.01
