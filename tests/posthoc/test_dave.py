"""DAVE, against a loop over shifts that moves every pixel by hand, on a ViT that is walked by hand."""

from functools import partial

import pytest
import references_propagation as references
import torch
from references_masks import patch_means

from explainers.posthoc import DAVE
from explainers.posthoc.dave import even_shifts

CLASSES = torch.tensor([3, 0, 4, 1, 1])
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_dtype=False)


def move(image, rows, columns):
    """Move an image (C, H, W) down and to the right; new pixels are like their neighbours at the border."""
    moved, (_, height, width) = torch.empty_like(image), image.shape
    for row in range(height):
        for column in range(width):
            moved[:, row, column] = image[
                :, min(max(row - rows, 0), height - 1), min(max(column - columns, 0), width - 1)
            ]
    return moved


def effective_gradient(target, normalised, v):
    """The gradient at pixels with constant gates; before the first block, a ViT is affine."""
    normalised = normalised.clone().requires_grad_()
    patches = target.backbone.patch_embed(normalised[None])[0]
    prefix, x = target.backbone.num_prefix_tokens, references.entering(target, torch.zeros(3, 32, 32).byte())
    positions = x[prefix:] - target.backbone.patch_embed(target.normalise(torch.zeros(1, 3, 32, 32).byte()))[0].detach()
    tokens = torch.cat([x[:prefix], patches + positions])
    return torch.autograd.grad(references.walk(target, tokens, frozen=True)[1].embedding @ v, normalised)[0]


def slow(target, image, v, shifts):
    """x ⊙ the mean gradient, each moved back: what a pixel got from outside the image goes to the border."""
    normalised = target.normalise(image[None])[0].double()
    total = torch.zeros_like(normalised)
    for rows, columns in shifts:
        gradient = effective_gradient(target, move(normalised, rows, columns), v)
        for row in range(32):
            for column in range(32):
                total[:, min(max(row - rows, 0), 31), min(max(column - columns, 0), 31)] += gradient[:, row, column]
    return (normalised * total / len(shifts)).sum(0)


@pytest.mark.parametrize(("samples", "radius"), [(1, 4), (3, 4), (4, 20)])
def test_it_is_the_mean_of_shifted_explanations_moved_back(double, grid, images, samples, radius):
    method = DAVE(double, grid, samples=samples, radius=radius, chunk_size=2)
    details = method.details(images[:2], CLASSES[:2])
    for number in range(2):
        v = references.of_class(double, CLASSES[number]).double()
        expected = slow(double, images[number], v, method.shifts.tolist())
        close(details.pixels[number], expected)
        close(details.heatmaps[number], 64 * patch_means(expected, 4))


def test_shifts_cover_the_square_evenly_and_begin_with_none():
    shifts = even_shifts(50, 8)
    assert shifts[0].tolist() == [0, 0] and shifts.abs().max() == 8
    assert shifts.double().mean(0).abs().max() < 1
    assert len({(row // 4, column // 4) for row, column in shifts.tolist()}) >= 16
