"""Explainers as captum and Quantus call them."""

import captum.metrics
import numpy as np
import pytest
import torch
from conftest import wake
from toys import LIGHT

from explainers.errors import InputError
from explainers.posthoc import GAE
from explainers.share.adapters import CaptumAttribution, quantus_explain, to_uint8
from explainers.tve import TVE


@pytest.fixture(params=["learned", "post-hoc"])
def explainer(request, target, grid):
    tve = TVE(target, grid, LIGHT).eval()
    wake(tve.network)
    return tve if request.param == "learned" else GAE(target, grid)


def spread(heatmaps, channels):
    """Scores of 4 × 4 patches on the 8 × 8 pixels of each and on the channels, one pixel at a time."""
    pixels = torch.zeros(len(heatmaps), channels, 32, 32)
    for row in range(32):
        for column in range(32):
            score = heatmaps[:, row // 8, column // 8].detach()
            pixels[:, :, row, column] = (score / (8 * 8 * channels))[:, None]
    return pixels


def test_every_pixel_of_an_image_survives_the_way_to_the_model_and_back(make_target):
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    for name in ("vit_tiny_patch16_224", "test_resnet"):  # two means and deviations
        target = make_target(name)
        assert torch.equal(to_uint8(target.normalise(images), target), images)
    assert to_uint8(torch.full((1, 3, 1, 1), 9.0), target).tolist() == [[[[255]], [[255]], [[255]]]]


def test_captum_gets_the_heatmap_divided_among_pixels_and_channels(explainer, target, images):
    attribution, inputs, classes = CaptumAttribution(explainer), target.normalise(images), torch.tensor([4, 0, 2, 1, 1])
    heatmaps = explainer(images, classes)
    found = attribution.attribute(inputs, classes)
    assert found.shape == inputs.shape and found.dtype == inputs.dtype
    torch.testing.assert_close(found, spread(heatmaps, channels=3))
    torch.testing.assert_close(found.sum((1, 2, 3)), heatmaps.sum((1, 2)), rtol=1e-4, atol=1e-5)  # nothing is lost
    assert torch.equal(attribution.attribute(inputs, 3), attribution.attribute(inputs, torch.full((5,), 3)))
    (predicted,) = attribution.attribute((inputs,))
    assert torch.equal(predicted, attribution.attribute(inputs, target(images).argmax(-1)))


def test_metrics_of_captum_measure_it(explainer, target, images):
    attribution, inputs = CaptumAttribution(explainer), target.normalise(images)
    found = attribution.attribute(inputs, 2)
    infidelity = captum.metrics.infidelity(
        attribution.forward_func, lambda inputs: (inputs, 0 * inputs), inputs, found, target=2
    )
    logits, blank = target(images)[:, 2], target.classify(target.embed(torch.zeros(1, 3, 32, 32)))[0, 2]
    products = (found * inputs).sum((1, 2, 3))
    torch.testing.assert_close(infidelity, (products - (logits - blank)).square(), rtol=1e-4, atol=1e-5)
    close = captum.metrics.sensitivity_max(attribution.attribute, inputs, perturb_radius=0.001, target=2)
    assert close.tolist() == pytest.approx([0] * 5, abs=1e-5)  # less than half of a pixel's 256 values: the same image
    assert (captum.metrics.sensitivity_max(attribution.attribute, inputs, perturb_radius=0.5, target=2) > 0).all()


@pytest.mark.parametrize("classes", [None, 2])
def test_images_of_another_size_are_refused(classes, explainer, target, images):
    inputs = target.normalise(images)[..., :24, :24]
    with pytest.raises(InputError, match=r"^the grid cuts 32 × 32 images; got \(24, 24\)$"):
        CaptumAttribution(explainer).attribute(inputs, classes)
    with pytest.raises(InputError, match=r"^the grid cuts 32 × 32 images; got \(24, 24\)$"):
        quantus_explain(explainer)(None, inputs.numpy(), np.array([4, 0, 2, 1, 1]))


def test_quantus_gets_numpy_arrays(explainer, target, images):
    inputs, classes = target.normalise(images).numpy(), np.array([4, 0, 2, 1, 1])
    found = quantus_explain(explainer)(model=None, inputs=inputs, targets=classes, device="cpu")
    assert found.shape == (5, 1, 32, 32) and found.dtype == np.float32
    expected = spread(explainer(images, torch.tensor(classes)), channels=1)
    torch.testing.assert_close(torch.from_numpy(found), expected)


def test_quantus_measures_it(explainer, target, images):
    quantus = pytest.importorskip("quantus", reason="Quantus is not installed: make peers")
    inputs, classes = target.normalise(images).numpy(), target(images).argmax(-1).numpy()
    metric = quantus.Sparseness(disable_warnings=True)
    scores = metric(CaptumModel(target), inputs, classes, explain_func=quantus_explain(explainer))
    assert len(scores) == 5 and all(0 <= score <= 1 for score in scores)


class CaptumModel(torch.nn.Module):
    """A classifier of normalised images, as Quantus wants one."""

    def __init__(self, target):
        super().__init__()
        self.target = target

    def forward(self, inputs):
        return self.target.classify(self.target.embed(inputs))


def test_an_explainer_that_does_not_say_what_it_explains_is_refused():
    for adapter in (CaptumAttribution, quantus_explain):
        with pytest.raises(InputError, match="^expected an explainer with the model .* attribute target, got Identity"):
            adapter(torch.nn.Identity())
