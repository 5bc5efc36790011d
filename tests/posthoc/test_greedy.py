"""The greedy order of patches, against loops and against the best of all orders."""

import pytest
import references
import torch
from test_pixel_gradients import CLASSES

from benchmarks.greedy_order import GreedyOrder, candidate_counts, greedy_order
from explainers.masking import PatchGrid
from explainers.models.removal import embed_visible

RANKS = torch.arange(16, 0, -1) / 16


def slow_order(value, patches, candidates, step):
    """The search for one image, one set at a time; `value` takes a set of patches."""
    gains, chosen = dict.fromkeys(range(patches), 0.0), []
    while len(chosen) < patches:
        rest = sorted((patch for patch in range(patches) if patch not in chosen), key=lambda z: (-gains[z], z))
        tried = rest[:candidates] if chosen else rest
        for patch in tried:
            gains[patch] = value({*chosen, patch}) - value(set(chosen))
        chosen += sorted(tried, key=lambda z: (-gains[z], z))[:step]
    return chosen


def prediction(target, image, label, removal):
    """The probability of a class of one normalised image, of which a set of patches is visible."""
    fills = {"zero": 0.0, "black": -target.mean / target.std}

    def predict(visible):
        if removal != "drop":
            fill = torch.zeros_like(image) + fills[removal]
            seen = fill if not visible else references.only(image, visible, 4, fill)
            return target.score_images(seen[None])[0, label].item()
        keep = torch.tensor([[patch in visible for patch in range(16)]])
        return target.classify(embed_visible(target, image[None], keep)).softmax(-1)[0, label].item()

    return predict


@torch.no_grad()
@pytest.mark.parametrize("removal", ["zero", "black", "drop"])
def test_the_search_is_the_reference(target, grid, images, removal):
    explainer = GreedyOrder(target, grid, removal, candidates=5, step=3)
    heatmaps = explainer(images[:2], CLASSES[:2])
    for i, image in enumerate(target.normalise(images[:2])):
        predict = prediction(target, image, CLASSES[i], removal)
        order = slow_order(lambda chosen: predict(chosen) - predict(set(range(16)) - chosen), 16, 5, 3)  # noqa: B023
        assert torch.equal(heatmaps[i].flatten()[order], RANKS)


def test_effects_that_add_up_are_ordered_exactly(target, grid):
    weights = torch.tensor([3, 14, 7, 0, 11, 5, 9, 1, 15, 4, 12, 8, 2, 13, 6, 10]) / 128 - 0.05
    white = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
    target.embed = lambda normalised: 0.2 + (normalised[:, 0, ::8, ::8] != 0).flatten(1).float() @ weights[:, None]
    target.classify = lambda share: torch.cat([share, 1 - share], 1).log()
    for candidates, step in ((16, 1), (3, 2), (9, 9)):
        explainer = GreedyOrder(target, grid, candidates=candidates, step=step)
        for_and_against = explainer(white, torch.tensor([0, 1])).flatten(1)
        assert torch.equal(for_and_against[0].argsort(), weights.argsort())
        assert torch.equal(for_and_against[1], 17 / 16 - for_and_against[0])


def test_equal_patches_are_chosen_by_their_number():
    worth = torch.tensor([[1.0, 2, 2, 1, 2, 1], [0, 0, 0, 0, 0, 0]])
    order = greedy_order(lambda sets: (sets * worth[:, None]).sum(-1), 2, 6, candidates=4, step=2)
    assert order.tolist() == [[1, 2, 4, 0, 3, 5], [0, 1, 2, 3, 4, 5]]


def test_the_step_is_a_twentieth_of_the_patches_unless_candidates_are_fewer(target, make_target):
    assert candidate_counts(7, candidates=4, step=4) == [7, 3]
    explainer = GreedyOrder(make_target(img_size=224, patch_size=16), PatchGrid(224, 16))
    assert (explainer.step, explainer.candidates, explainer.forward_passes) == (10, 28, 1424)
    steps = [GreedyOrder(target, PatchGrid(32, size, differs=True)).step for size in (8, 1)]
    assert steps == [1, 28]
