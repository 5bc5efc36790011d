"""Explainers as captum and Quantus call them, and targets as captum, Quantus and pytorch-grad-cam call models."""

import captum.attr
import captum.metrics
import numpy as np
import pytest
import torch
from conftest import wake
from toys import LIGHT

from explainers import posthoc
from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.posthoc import GAE, IntegratedGradients
from explainers.share.adapters import CaptumAttribution, quantus_explain, to_uint8
from explainers.share.views import NormalisedModel
from explainers.tve import TVE


@pytest.fixture
def explainer(target, grid):
    tve = TVE(target, grid, LIGHT).eval()
    wake(tve.network)
    return tve


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


@pytest.mark.parametrize("kind", ["learned", "post-hoc"])
def test_captum_gets_the_heatmap_divided_among_pixels_and_channels(explainer, target, grid, images, kind):
    explainer = explainer if kind == "learned" else GAE(target, grid)
    attribution, inputs, classes = CaptumAttribution(explainer), target.normalise(images), torch.tensor([4, 0, 2, 1, 1])
    heatmaps = explainer(images, classes)
    found = attribution.attribute(inputs, classes)
    assert found.shape == inputs.shape and found.dtype == inputs.dtype
    torch.testing.assert_close(found, spread(heatmaps, channels=3))
    torch.testing.assert_close(found.sum((1, 2, 3)), heatmaps.sum((1, 2)), rtol=1e-4, atol=1e-5)  # nothing is lost
    assert torch.equal(attribution.attribute(inputs, 3), attribution.attribute(inputs, torch.full((5,), 3)))
    (predicted,) = attribution.attribute((inputs,))
    assert torch.equal(predicted, attribution.attribute(inputs, target(images).argmax(-1)))


def test_images_of_another_size_are_refused(explainer, target, images):
    inputs = target.normalise(images)[..., :24, :24]
    with pytest.raises(InputError, match=r"^the grid cuts 32 × 32 images; got \(24, 24\)$"):
        CaptumAttribution(explainer).attribute(inputs, 2)


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
    scores = metric(NormalisedModel(target), inputs, classes, explain_func=quantus_explain(explainer))
    assert len(scores) == 5 and all(0 <= score <= 1 for score in scores)


def test_integrated_gradients_of_captum_on_the_view_are_ours(target, grid, images):
    model, classes = NormalisedModel(target), torch.tensor([4, 0, 2, 1, 1])
    theirs = captum.attr.IntegratedGradients(model).attribute(target.normalise(images), target=classes, n_steps=6)
    patches = theirs.sum(1).unfold(1, 8, 8).unfold(2, 8, 8).sum((-1, -2)).float()
    ours = IntegratedGradients(target, grid, steps=6)(images, classes)
    torch.testing.assert_close(ours, patches, rtol=1e-3, atol=1e-4 * ours.abs().max().item())


CAMS = {"ElementWiseCAM": "GradCAMElementWise"}
CAMS |= {name: name for name in ("GradCAM", "HiResCAM", "LayerCAM", "XGradCAM")}
WITHOUT_RELU = {"HiResCAM", "XGradCAM"}  # in their papers; pytorch-grad-cam has a ReLU everywhere


def peer(name):
    """A class of pytorch-grad-cam."""
    return getattr(pytest.importorskip("pytorch_grad_cam", reason="pytorch-grad-cam is missing: make peers"), name)


def assert_same_up_to_scale(ours, theirs):
    """pytorch-grad-cam scales every map to [0, 1]."""
    ours = ours - ours.amin((1, 2), keepdim=True)
    largest = ours.amax((1, 2), keepdim=True)
    assert (largest > 0).any()
    torch.testing.assert_close(ours / (largest + 1e-7), torch.from_numpy(theirs), rtol=1e-3, atol=1e-3)


SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 4)}
RECOMMENDED = {
    "ViT": (
        "vit_tiny_patch16_224",
        {"depth": 3},
        PatchGrid(32, 8),
        lambda backbone: backbone.blocks[-1].norm1,
        lambda tokens: tokens[:, 1:].mT.unflatten(-1, (4, 4)),
        {},
    ),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        SWIN,
        PatchGrid(32, 4),
        lambda backbone: backbone.layers[-1].blocks[-1].norm1,
        lambda tokens: tokens.movedim(-1, 1),
        {},
    ),
    "ResNet": ("test_resnet", {}, PatchGrid(64, 16), lambda backbone: backbone.layer3, None, {"layer": 3}),
}
"""A model of timm and its patches; the target layer and the reshape_transform that pytorch-grad-cam documents; ours.

A ResNet's last layer but one has 4 x 4 positions of such small images."""


@pytest.mark.parametrize(
    ("name", "family"), [*((name, "ViT") for name in CAMS), ("GradCAM", "Swin"), ("GradCAM", "ResNet")]
)
def test_cam_of_pytorch_grad_cam_at_the_layer_that_it_recommends_is_ours(make_target, name, family):
    name_in_timm, settings, grid, layer_of, as_maps, options = RECOMMENDED[family]
    target, classes = make_target(name_in_timm, **settings), [2, 4]
    images = torch.randint(0, 256, (2, 3, *grid.size), dtype=torch.uint8)
    model = NormalisedModel(target)
    with peer(CAMS[name])(model, [layer_of(model.target.backbone)], as_maps) as method:
        method.get_target_width_height = lambda inputs: None  # at the size of the map
        theirs = method(target.normalise(images), [lambda logits, k=k: logits[k] for k in classes])
    options = options | ({"relu": True} if name in WITHOUT_RELU else {})
    ours = posthoc.build(name, target, grid, options)(images, torch.tensor(classes))
    assert_same_up_to_scale(ours, theirs)


def test_the_view_shares_the_weights_and_lets_gradients_flow(target, images):
    model, inputs = NormalisedModel(target.train()), target.normalise(images).requires_grad_()
    logits = model(inputs)
    torch.testing.assert_close(logits, target(images))
    assert torch.autograd.grad(logits.sum(), inputs)[0].abs().sum() > 0
    assert not model.training and not target.training
    assert next(model.parameters()) is next(target.parameters())
