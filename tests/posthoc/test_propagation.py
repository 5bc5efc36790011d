"""DecompX and relevance, against decompositions and relevance that are propagated as tensors."""

import pytest
import references_propagation as references
import torch
from torch import nn

from explainers.posthoc.gradients import FullGrad
from explainers.posthoc.layerwise import PLUS
from explainers.posthoc.propagation import (
    FROZEN,
    AttnLRP,
    ConservativeLRP,
    DecompX,
    LibraGrad,
    ResLRP,
    libra,
)
from explainers.posthoc.white_box import positive_seeds
from explainers.transformer import rules
from explainers.transformer.recording import Record

frozen_full_grad = libra(FullGrad)
LABELS = torch.tensor([3, 0])


@pytest.fixture
def images(images):
    return images[:2]


def test_libragrad_is_frozen_fullgrad_plus_of_the_probability(double, grid, images):
    with torch.no_grad():
        embeddings = double.embed(double.normalise(images))
        p = double.classify(embeddings).softmax(-1).double()
    rows = torch.stack([references.of_class(double, label).double() for label in range(5)])
    expected = []
    for i, (image, label) in enumerate(zip(images, LABELS.tolist(), strict=True)):
        v = p[i, label] * (rows[label] - p[i] @ rows)
        expected.append(references.full_grad_plus(double, references.entering(double, image), v, frozen=True))
    heatmaps = LibraGrad(double, grid)(images, LABELS).double()
    for heatmap, wanted in zip(heatmaps, expected, strict=True):  # probabilities are single precision
        torch.testing.assert_close(heatmap, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def relevance_of(y, of_y, *summands):
    """x times the gradient of each summand, for the relevance R of y."""
    gradients = torch.autograd.grad(y, summands, of_y / y.detach())
    return [x.detach() * gradient for x, gradient in zip(summands, gradients, strict=True)]


def test_rules_conserve_relevance():
    x, update, of_y = (torch.randn(2, 7, 6, dtype=torch.double) for _ in range(3))
    x.requires_grad_()
    update.requires_grad_()
    for gamma in (0, 0.25, 1, 10):
        of_x, of_update = relevance_of(rules.signed_residual(x, update, gamma), of_y, x, update)
        torch.testing.assert_close(of_x + of_update, of_y)
        if gamma:  # the paper's bound, which the gradient does not have
            assert ((of_x.abs() + of_update.abs()) <= (1 + 2 / gamma) * of_y.abs() * (1 + 1e-9)).all()
    parts = relevance_of(rules.conserved_residual(x, update), of_y, x, update)
    torch.testing.assert_close(sum(part.sum((1, 2)) for part in parts), of_y.sum((1, 2)))
    sums = torch.stack([part.sum((1, 2)) for part in parts])
    assert (sums * of_y.sum((1, 2)) >= 0).all()  # all have the sign of the whole
    weight = torch.randn(5, 6, dtype=torch.double)
    y = x.detach() @ weight.T
    (of_x,) = relevance_of(rules.linear(x, weight, y), torch.ones_like(y), x)
    shared = (x[..., None, :] * weight > 0).any(-1)  # an output without positive summands keeps its relevance
    torch.testing.assert_close(of_x.sum(-1), shared.sum(-1).double())
    assert (of_x >= 0).all()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.SELU, nn.Hardswish, nn.GELU, nn.SiLU])
def test_every_activation_of_a_block_passes_on_its_relevance(activation):
    x = torch.linspace(-3, 7, 8, dtype=torch.double).requires_grad_()
    record = Record((), FROZEN, attention=False)
    record.entered = 1
    with record:
        y = activation()(x)
    torch.testing.assert_close(y, activation()(x))
    torch.testing.assert_close(x * torch.autograd.grad(y.sum(), x)[0], y)


def test_a_sum_without_positive_summands_has_nobody_to_give_relevance_to():
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    weight = torch.tensor([[-1.0, -1.0], [1.0, -1.0]])
    y = rules.linear(x, weight, x.detach() @ weight.T)
    assert y.tolist() == [[-3.0, -1.0]]
    assert relevance_of(y, torch.tensor([[1.0, 1.0]]), x)[0].tolist() == [[1.0, 0.0]]


def test_the_seeds_of_lrp_are_shares_of_one():
    seeds = positive_seeds(torch.tensor([[2.0, -1.0, 3.0]]), torch.tensor([[[1.0, -2.0, -1.0], [-1.0, 1.0, -1.0]]]))
    torch.testing.assert_close(seeds, torch.tensor([[[0.25, -0.5, 0.0], [0.0, 0.0, 0.0]]]))


ROW, COLUMN = 1, 3


@pytest.fixture
def bright(make_target):
    """A ViT whose attention is uniform and copies; class 0 means bright, and class 1 means dark.

    Channels 0 and 1 of a patch are its brightness and the opposite; 2 and 3 are constants, so that dim stays dim.
    """
    target = make_target(num_classes=2)
    backbone = target.backbone
    with torch.no_grad():
        for name, weight in backbone.named_parameters():
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        backbone.patch_embed.proj.weight[0], backbone.patch_embed.proj.weight[1] = 1 / 192, -1 / 192
        backbone.patch_embed.proj.bias[2:4] = torch.tensor([1.0, -1.0])
        for block in backbone.blocks:
            block.attn.qkv.weight[48:].copy_(torch.eye(24))
            block.attn.proj.weight.copy_(torch.eye(24))
            block.mlp.fc1.weight[:24].copy_(torch.eye(24))
            block.mlp.fc2.weight[:, :24].copy_(0.1 * torch.eye(24))
        nn.init.zeros_(target.head.weight)
        nn.init.zeros_(target.head.bias)
        target.head.weight[0, :2], target.head.weight[1, :2] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    return target


@pytest.mark.parametrize("of", [DecompX, AttnLRP, ConservativeLRP, ResLRP, frozen_full_grad])
def test_a_bright_patch_is_found(bright, grid, of):
    images = torch.randint(120, 136, (6, 3, 32, 32), dtype=torch.uint8)
    images[..., ROW * 8 : (ROW + 1) * 8, COLUMN * 8 : (COLUMN + 1) * 8] = 255
    assert (bright(images).argmax(1) == 0).all()
    method = PLUS(bright, grid, of)
    heatmaps, against = (method(images, torch.full((6,), label)) for label in (0, 1))
    assert (heatmaps.flatten(1).argmax(1) == ROW * 4 + COLUMN).all()
    torch.testing.assert_close(against, -heatmaps, rtol=1e-3, atol=1e-4 * heatmaps.abs().max().item())
