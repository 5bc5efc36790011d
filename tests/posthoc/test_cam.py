"""Class activation maps against captum; their formulas are in `test_layerwise`."""

import pytest
import torch
from captum.attr import LayerGradientXActivation

from explainers import posthoc

LABELS = torch.tensor([3, 0, 4])


@pytest.fixture
def images(images):
    return images[:3]


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
