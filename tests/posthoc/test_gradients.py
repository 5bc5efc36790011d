"""Gradients, Input × Gradient and FullGrad, against forward passes written out layer by layer."""

import pytest
import references_propagation as references
import torch
from toys import assert_same

from explainers.posthoc.gradients import CAT, AttCAT, AttIxG, FullGrad, InputXGradient, TokenGradient
from explainers.posthoc.layerwise import PLUS
from explainers.posthoc.propagation import DecompX, libra

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


def test_a_network_without_biases_has_the_fullgrad_of_its_input(make_target, grid, images):
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    target = make_target("aimv2_large_patch14_224", **size)
    for of, plain in ((FullGrad, InputXGradient), (frozen_full_grad, DecompX)):
        method = PLUS(target, grid, of)
        expected = PLUS(target, grid, plain)(images, LABELS)
        torch.testing.assert_close(method(images, LABELS), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_biases_of_relative_positions_belong_to_no_token(make_target, grid, images):
    """They change attention weights only, which are constants under the rules `FROZEN`."""
    target = make_target("vit_relpos_small_patch16_224")
    heatmaps = PLUS(target, grid, frozen_full_grad)(images, LABELS)
    assert heatmaps.shape == (2, 4, 4) and heatmaps.isfinite().all() and heatmaps.abs().max() > 0


def test_the_sum_of_a_gradient_over_channels_is_zero_behind_layer_norm(target, make_target, grid, images):
    """SkipPLUS, Section E.1, has this sum. RMSNorm does not subtract a mean."""
    sums = TokenGradient(target, grid, channels="sum")(images, LABELS)
    assert sums.abs().max() < 1e-10 * TokenGradient(target, grid)(images, LABELS).abs().max()
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    other, tokens = references.in_double(make_target("aimv2_large_patch14_224", **size)), []
    other.backbone.blocks[0].register_forward_pre_hook(lambda module, args: tokens.append(args[0]))
    score = other.embed(other.normalise(images[:1])) @ references.of_class(other, 3).double()
    expected = torch.autograd.grad(score, tokens)[0].sum(-1).reshape(1, 4, 4)
    assert_same(TokenGradient(other, grid, channels="sum")(images[:1], LABELS[:1]), expected)
    assert expected.abs().max() > 0
