"""Class activation maps, against forward passes written out layer by layer, and against captum."""

from functools import partial

import pytest
import references_propagation as references
import torch
from captum.attr import LayerGradientXActivation
from toys import assert_same

from explainers import posthoc

METHODS = {
    "GradCAM": references.grad_cam,
    "XGradCAM": references.x_grad_cam,
    "XGradCAMPlus": partial(references.x_grad_cam, sized=torch.abs),
    "GradCAMPlusPlus": references.grad_cam_plus_plus,
    "HiResCAM": references.input_x_gradient,
    "ElementWiseCAM": references.element_wise_cam,
    "LayerCAM": references.layer_cam,
}
RECTIFIED = {"GradCAM", "GradCAMPlusPlus", "LayerCAM"}
"""Those whose papers have a ReLU; of GradCAMElementWise no score is negative."""
LABELS = torch.tensor([3, 0, 4])


@pytest.fixture
def images(images):
    return images[:3]


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("name", METHODS)
def test_the_map_of_a_layer_is_that_of_the_network_from_this_layer_on(double, grid, images, name, layer):
    index = range(len(double.backbone.blocks))[layer]
    expected = references.maps(double, images, LABELS, index, METHODS[name])
    options = {"layer": layer, "tokens": "input"}
    assert_same(posthoc.build(name, double, grid, options | {"relu": False})(images, LABELS), expected)
    of_the_paper = expected.clamp(min=0) if name in RECTIFIED else expected
    assert_same(posthoc.build(name, double, grid, options)(images, LABELS), of_the_paper)


def test_cat_is_plus_of_hirescam(target, grid, images):
    """SkipPLUS, Section 3.4: HiResCAM is Input × Gradient of the last layer."""
    heatmaps = posthoc.build("HiResCAM-PLUS", target, grid)(images, LABELS)
    assert torch.equal(heatmaps, posthoc.CAT(target, grid)(images, LABELS))


@pytest.mark.parametrize("layer", [0, -2])
def test_captum_has_the_same_gradients_of_layers(make_target, grid, images, layer):
    target = make_target(depth=3)
    for name, multiplied in {"HiResCAM": True, "TokenGradient": False}.items():
        block = target.backbone.blocks[layer]
        peer = LayerGradientXActivation(lambda pixels: target.classify(target.embed(pixels)), block, None, multiplied)
        theirs = peer.attribute(target.normalise(images), LABELS, attribute_to_layer_input=True)[:, 1:]
        expected = theirs.sum(-1) if multiplied else theirs.norm(dim=-1)
        of_inputs = {"tokens": "input"} if multiplied else {}
        found = posthoc.build(name, target, grid, {"layer": layer} | of_inputs)(images, LABELS).flatten(1)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5 * expected.abs().max().item())
