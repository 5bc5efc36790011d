"""Random coalitions, with which Shapley values are learned, and AnyHead's regions."""

import math
from functools import partial

import pytest
import references
import references_anyhead
import torch
from toys import distance

from explainers.refinement.coalitions import region_coalitions
from explainers.shapley.coalition_draws import random_coalitions, shapley_coalitions, shapley_weights


@pytest.mark.parametrize(("num_patches", "power", "paired"), [(2, 1, True), (16, 1, True), (9, 0, False), (9, 2, True)])
def test_coalitions_have_the_sizes_that_their_power_asks_for(num_patches, power, paired):
    keep = shapley_coalitions(torch.arange(4000), num_patches, 6, seed=3, paired=paired, power=power)
    assert keep.shape == (4000, 6, num_patches)
    for drawn in (keep[:, :1], keep[:, 4:5], keep[:, ::2]):  # independent ones: pairs have sizes k and N − k
        counts = drawn.sum(-1).flatten().bincount(minlength=num_patches + 1)
        if num_patches == 2:
            assert counts.tolist() == [0, counts.sum(), 0]
        else:
            assert distance(counts, references_anyhead.coalition_sizes(num_patches, power)) < 5


@pytest.mark.parametrize("power", [0, 0.5, 1])
def test_weighed_coalitions_of_any_power_stand_for_those_of_the_shapley_kernel(power):
    """The expectation of any function of the size is the same: exactly, and as a mean over draws."""
    drawn, kernel = references_anyhead.coalition_sizes(9, power), references.shapley_sizes(9)
    one_of_each = torch.ones(9, 9).tril(-1)[1:].bool()  # of the sizes 1 to 8
    weights = shapley_weights(one_of_each, power)
    torch.testing.assert_close(weights * torch.tensor(drawn[1:9]), torch.tensor(kernel[1:9]))
    keep = shapley_coalitions(torch.arange(4000), 9, 6, seed=3, power=power)
    weights, sizes = shapley_weights(keep, power), keep.sum(-1)
    assert weights.shape == (4000, 6)
    for size in range(1, 9):
        share = (weights * (sizes == size)).mean().item()
        assert share == pytest.approx(kernel[size], abs=5 * (kernel[size] * weights.max().item() / 12_000) ** 0.5)
    assert weights.mean().item() == pytest.approx(1, abs=0.03)
    assert (weights == 1).all() == (power == 1)


def test_random_coalitions_have_every_size_equally_often():
    keep = random_coalitions(torch.arange(4000), 9, 3, seed=3)
    assert keep.shape == (4000, 3, 9)
    assert keep.dtype == torch.bool
    for m in range(3):
        assert distance(keep[:, m].sum(-1).bincount(minlength=10), [0.1] * 10) < 5


@pytest.mark.parametrize("shape", [(2, 2), (2, 8)])
def test_coalitions_of_regions_have_every_size_from_1_to_all_but_1_equally_often(shape):
    num_patches = math.prod(shape)
    keep = region_coalitions(torch.arange(4000), shape, 3, seed=3)
    assert keep.shape == (4000, 3, num_patches)
    assert keep.dtype == torch.bool
    sizes = [0, *[1 / (num_patches - 1)] * (num_patches - 1), 0]
    for m in range(3):
        assert distance(keep[:, m].sum(-1).bincount(minlength=num_patches + 1), sizes) < 5


def test_small_regions_do_not_prefer_the_border_of_the_image():
    """Where an interpolation repeats its last values, small coalitions lie at the border, two to six times as often."""
    keep = region_coalitions(torch.arange(2000), (14, 14), 4, seed=1).flatten(0, 1)
    small = keep[keep.sum(-1) < 20].float().mean(0).view(14, 14)
    ring = torch.ones(14, 14, dtype=torch.bool)
    ring[1:-1, 1:-1] = False
    corners = small[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert 0.8 < small[ring].mean() / small.mean() < 1.25
    assert 0.6 < corners.mean() / small.mean() < 1.5


@pytest.mark.parametrize("shape", [(3, 3), (5, 9)])
def test_neighbours_are_in_one_region_more_often_than_patches_drawn_one_by_one_and_far_ones_are_not(shape):
    rows, columns = shape
    single = partial(shapley_coalitions, paired=False, power=0)
    regions, alone = (
        draw(torch.arange(1500), patches, 2, seed=1).unflatten(-1, shape)
        for draw, patches in ((region_coalitions, shape), (single, rows * columns))
    )

    def together(keep, down, right):
        """How often two patches so far apart are both in the coalition, or both not."""
        return (keep[..., down:, right:] == keep[..., : rows - down, : columns - right]).float().mean()

    for down, right in ((0, 1), (1, 0)):
        assert together(regions, down, right) > together(alone, down, right) + 0.05
    assert together(regions, rows - 1, columns - 1) < together(alone, rows - 1, columns - 1) + 0.02


@pytest.mark.parametrize("draw", [random_coalitions, shapley_coalitions])
def test_of_a_size_every_coalition_is_drawn_equally_often(draw):
    keep = draw(torch.arange(20_000), 4, 1, seed=1)[:, 0]
    for size, codes in ((1, [1, 2, 4, 8]), (2, [3, 5, 6, 9, 10, 12]), (3, [7, 11, 13, 14])):
        drawn = keep[keep.sum(1) == size]
        counts = (drawn * torch.tensor([1, 2, 4, 8])).sum(1).bincount(minlength=16)[codes]
        assert counts.sum() == len(drawn) > 3000
        assert distance(counts, [1 / len(codes)] * len(codes)) < 5


@pytest.mark.parametrize("count", [6, 7])
def test_paired_coalitions_are_complements_and_unpaired_ones_are_not(count):
    index = torch.arange(300)
    keep = shapley_coalitions(index, 16, count, seed=0)
    assert keep.shape == (300, count, 16)
    assert torch.equal(keep[:, 1::2], ~keep[:, 0 : count - count % 2 : 2])
    assert (keep[:, 2] == keep[:, 1]).all(-1).float().mean() < 0.05
    alone = shapley_coalitions(index, 16, count, seed=0, paired=False)
    assert (alone[:, 1] == ~alone[:, 0]).all(-1).float().mean() < 0.05


@pytest.mark.parametrize(
    ("draw", "patches"), [(random_coalitions, 49), (shapley_coalitions, 49), (region_coalitions, (5, 8))]
)
def test_an_image_draws_the_same_coalitions_alone_as_in_a_batch_and_others_in_another_epoch(draw, patches):
    index = torch.tensor([3, 1_281_166, 0, 2**35])
    together = draw(index, patches, 4, 9)
    assert torch.equal(together, torch.cat([draw(index[i : i + 1], patches, 4, 9) for i in range(4)]))
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, draw(index, patches, 4, 10))
