"""Gradients, Input × Gradient and FullGrad, against forward passes written out layer by layer."""

import pytest
import references_propagation as references
import torch
from toys import assert_same

from explainers.posthoc.gradients import CAT, AttCAT, AttIxG, FullGrad, InputXGradient
from explainers.posthoc.layerwise import PLUS
from explainers.posthoc.propagation import libra

frozen_full_grad = libra(FullGrad)
LABELS = torch.tensor([3, 0])


@pytest.fixture
def target(double):
    return double


@pytest.fixture
def images(images):
    return images[:2]


@pytest.mark.parametrize(("method", "of"), [(CAT, InputXGradient), (AttCAT, AttIxG)])
def test_cat_and_attcat_are_plus(target, grid, images, method, of):
    """SkipPLUS, Section 3.4."""
    assert torch.equal(method(target, grid)(images, LABELS), PLUS(target, grid, of)(images, LABELS))


def test_attention_may_weigh_the_input_of_the_next_layer(target, grid, images):
    """As the code of SkipPLUS does: L − 1 maps."""
    expected = []
    for image, label in zip(images, LABELS.tolist(), strict=True):
        blocks = references.walk(target, references.entering(target, image))[0]
        total, v = 0, references.of_class(target, label).double()
        for layer in range(len(blocks) - 1):
            seen = torch.stack(blocks[layer].weights).mean((0, 1))
            own = references.input_x_gradient(target, blocks[layer + 1].x.detach(), layer + 1, v)
            total = total + own * references.on_grid(target, seen)
        expected.append(total)
    method = PLUS(target, grid, lambda **to: AttIxG(**to, next_input=True))
    assert_same(method(images, LABELS), expected)


@pytest.mark.parametrize(("first", "frozen"), [(0, False), (1, True)])
def test_fullgrad_plus_counts_each_bias_once(target, grid, images, first, frozen):
    """SkipPLUS, Equations 5 and 6; naive PLUS counts a bias in every layer up to its own."""
    of = frozen_full_grad if frozen else FullGrad
    heatmaps = PLUS(target, grid, of, start=first)(images, LABELS)
    expected, naive = [], []
    for image, label in zip(images, LABELS.tolist(), strict=True):
        x, v = references.entering(target, image), references.of_class(target, label).double()
        expected.append(references.full_grad_plus(target, x, v, first, frozen))
        naive.append(references.plus(target, x, v, lambda *at: references.full_grad(*at, frozen=frozen), first))
    assert_same(heatmaps, expected)
    several = first < len(target.backbone.blocks) - 1
    assert torch.allclose(heatmaps.double(), torch.stack(naive), atol=1e-3 * heatmaps.abs().max()) != several
