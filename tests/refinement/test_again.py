"""Explaining again as patches leave: against loops over images and steps, and what users are told."""

import pytest
import torch

from explainers.evaluation.passes import count_passes
from explainers.masking import mask_pixels
from explainers.posthoc import build
from explainers.refinement import explain_again, refine
from explainers.refinement.again import hide_patches

CLASSES = torch.tensor([3, 0, 4, 1, 1])


def hide(image, gone, target, removal):
    """An uint8 image (3, 32, 32) without some of its 4 × 4 patches, on the scale of uint16."""
    hidden = image.double() * 65535 / 255
    for patch in gone:
        row, column = 8 * (patch // 4), 8 * (patch % 4)
        for channel in range(3):
            mean = 65535 * target.mean.flatten()[channel].item() if removal == "zero" else 0
            hidden[channel, row : row + 8, column : column + 8] = mean
    return hidden.round().int().to(torch.uint16)


def slow_ranks(explain, image, target, removal, steps, most):
    """The rank of each of 16 patches, 1 for the most important; `explain` returns a list of 16 scores."""
    gone = []
    for step in range(1, steps + 1):
        scores = explain(hide(image, gone, target, removal))
        left = sorted(set(range(16)) - set(gone), key=lambda patch: scores[patch], reverse=most)
        gone += left[: step * 16 // steps - len(gone)]
    return [1 - gone.index(patch) / 16 if most else (1 + gone.index(patch)) / 16 for patch in range(16)]


@pytest.mark.parametrize(
    ("name", "removal", "low", "high", "share"), [("AnyHead", "zero", 5, 3, 0.75), ("GAE", "black", 1, 8, 0.5)]
)
def test_ranks_are_those_of_loops_over_images_and_steps(anyhead, target, grid, images, name, removal, low, high, share):
    explainer = anyhead if name == "AnyHead" else build(name, target, grid)
    images, classes = images[:3], CLASSES[:3]
    found = explain_again(explainer, images, classes, low, high, removal, share=share)
    for image, label, heatmap in zip(images, classes, found, strict=True):
        arguments = (lambda seen: explainer(seen[None], label[None]).flatten().tolist()), image, target, removal  # noqa: B023
        ranks = zip(slow_ranks(*arguments, low, False), slow_ranks(*arguments, high, True), strict=True)
        expected = [share * lowest + (1 - share) * highest for lowest, highest in ranks]
        torch.testing.assert_close(heatmap.flatten(), torch.tensor(expected))


@pytest.mark.parametrize(("removal", "dtype"), [("zero", torch.uint8), ("black", torch.uint16)])
def test_hidden_patches_are_those_of_the_removal_of_metrics(target, grid, images, removal, dtype):
    target.mean.copy_(torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
    given = images if dtype == torch.uint8 else (images.int() * 251).to(dtype)
    keep = torch.rand(5, 16) < 0.5
    fill = -target.mean / target.std if removal == "black" else 0.0
    expected = mask_pixels(target.normalise(given), keep, grid, fill)
    found = target.normalise(hide_patches(given, keep, target, grid, removal))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_patch_that_stood_behind_another_is_found_when_that_has_left(target, grid):
    """The explainer sees only the brightest patch, so that all others are equal to it until this one has left."""

    def brightest(images, classes):
        means = images.float().mean(1).unfold(1, 8, 8).unfold(2, 8, 8).mean((-1, -2)).flatten(1)
        return (means * (means == means.amax(1, keepdim=True))).unflatten(1, (4, 4))

    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    image[:, :, :8, 8:16], image[:, :, 24:, :8] = 250, 200
    settings = {"target": target, "grid": grid, "removal": "black", "share": 0.0}
    found = explain_again(brightest, image, torch.tensor([0]), 1, 16, **settings)
    assert found.flatten().argsort(descending=True)[:2].tolist() == [1, 12]
    assert explain_again(brightest, image, torch.tensor([0]), 1, 1, **settings).flatten()[12] < 0.9


@pytest.mark.parametrize("share", [0.0, 2 / 3, 1.0])
def test_a_planted_patch_stays_first(additive, images, share):
    target, parts = additive
    grey = torch.full_like(images, 127)
    grey[:, :, 8:16, 16:24] = 255
    v = torch.randn(5, 24)
    sign = (parts(target.normalise(grey))[:, 6] * v).sum(-1, keepdim=True).sign()

    def exact(seen, classes):
        return (sign * (parts(target.normalise(seen)) * v[:, None]).sum(-1)).unflatten(1, (4, 4))

    found = explain_again(exact, grey, CLASSES, target=target, share=share)
    assert found.flatten(1).argmax(1).tolist() == [6] * 5 and found.amax() == 1


def test_functionals_are_explained_along_their_own_paths(anyhead, target, images):
    v = torch.randn(5, 24)
    found = explain_again(anyhead, images, functionals=v, low=4, high=4)
    bound = explain_again(lambda seen, _: anyhead.explain(seen, v), images, CLASSES, 4, 4, target=target)
    assert torch.equal(found, bound)
    assert not torch.equal(found, explain_again(anyhead, images, functionals=-v, low=4, high=4))


@pytest.mark.parametrize("passes", [2, 5])
def test_few_passes_of_refine_explain_again(anyhead, target, images, passes):
    with count_passes(target) as count:
        refined = refine(anyhead, images, CLASSES, passes)
        found = refined.heatmaps
    assert count.images == 5 * (passes + 1) and refined.passes == passes
    low, high = passes // 2 + 1, (passes + 1) // 2
    assert torch.equal(found, explain_again(anyhead, images, CLASSES, low, high))
    others = (CLASSES + 1) % 5
    assert torch.equal(refined.of(others).heatmaps, explain_again(anyhead, images, others, low, high))
    v = torch.randn(5, 2, 24)
    several = refined.explain(v)
    assert several.errors.isinf().all()
    assert torch.equal(several.heatmaps[:, 1], explain_again(anyhead, images, None, low, high, functionals=v[:, 1]))


def test_more_passes_draw_pairs_around_what_was_explained_again(anyhead, target, images):
    refined = refine(anyhead, images, CLASSES, 5)
    ranks = refined.heatmaps
    by_hand = refine(lambda *_: ranks, images, CLASSES, 40, target=target)
    assert refined.more(40).passes == 45
    torch.testing.assert_close(refined.heatmaps, by_hand.heatmaps, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(refined.errors, by_hand.errors, rtol=1e-4, atol=1e-5)
    assert refine(anyhead, images, CLASSES, 5).until(1e-9, 46).passes == 45
