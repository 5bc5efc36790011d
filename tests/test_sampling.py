from functools import partial

import pytest
import references
import references_anyhead
import torch

from explainers import sampling
from explainers.errors import InputError
from explainers.sampling import (
    random_coalitions,
    random_patches,
    region_coalitions,
    shapley_coalitions,
    shapley_weights,
    stream,
    uniform,
)


def chi_square(values, bins):
    """Of numbers in [0, 1) against equal bins; its mean is bins − 1, its deviation √(2·bins)."""
    counts = torch.histc(values.double(), bins, 0, 1)
    expected = len(values) / bins
    return ((counts - expected).square() / expected).sum()


@pytest.mark.parametrize("seed", [0, 1, 100_003, 2**31, 2**40 + 7])
@pytest.mark.parametrize(("start", "step"), [(0, 1), (0, 196), (2**33, 1), (2**33, 256), (0, 2**32), (2**45 + 3, 5)])
def test_numbers_spread_evenly_over_the_unit_interval(seed, start, step):
    numbers = uniform(start + step * torch.arange(20_000), seed)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(numbers.unique()) > 19_900
    assert chi_square(numbers, 100) < 180


def test_numbers_of_neighbours_have_nothing_to_do_with_each_other():
    counter = torch.arange(20_000)
    numbers = uniform(counter, 3)
    for others in (uniform(counter + 1, 3), uniform(counter, 4), uniform(counter + 2**32, 3), uniform(counter * 2, 3)):
        assert torch.corrcoef(torch.stack([numbers, others]))[0, 1].abs() < 0.03


def test_a_number_does_not_depend_on_its_neighbours():
    counter = torch.tensor([7, 2**34, 0, 195])
    together = uniform(counter, 5)
    assert together.tolist() == [uniform(counter[i : i + 1], 5).item() for i in range(4)]
    assert torch.equal(uniform(counter.flip(0), 5).flip(0), together)


@pytest.mark.parametrize("start", [0, 2**33 + 1])
def test_patches_of_an_image_are_different_and_in_the_grid(start):
    patches = random_patches(start + torch.arange(500), num_patches=49, count=7, seed=2)
    assert patches.shape == (500, 7)
    assert patches.min() >= 0
    assert patches.max() < 49
    assert all(len(set(row)) == 7 for row in patches.tolist())


def test_all_patches_are_drawn_when_all_are_asked_for():
    assert torch.equal(random_patches(torch.arange(20), 16, 16, 0).sort(1).values, torch.arange(16).expand(20, 16))


@pytest.mark.parametrize("position", [0, 3])
def test_every_patch_is_drawn_equally_often(position):
    patches = random_patches(torch.arange(20_000), num_patches=49, count=4, seed=1)[:, position]
    assert chi_square((patches + 0.5) / 49, 49) < 48 + 6 * 98**0.5


def test_an_image_draws_the_same_patches_alone_as_in_a_batch():
    index = torch.tensor([3, 1_281_166, 0, 2**35])
    together = random_patches(index, 196, 5, 9)
    assert torch.equal(together, torch.cat([random_patches(index[i : i + 1], 196, 5, 9) for i in range(4)]))


def test_images_and_epochs_draw_patches_of_their_own():
    index = torch.arange(2000)
    first, same, later = (random_patches(index, 196, 1, seed)[:, 0] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert (first == later).float().mean() < 0.02  # by chance 1 in 196
    assert (first[1:] == first[:-1]).float().mean() < 0.02


def distance(counts, probabilities):
    """χ² of counts against probabilities, in standard deviations from its mean."""
    expected = torch.tensor(probabilities) * counts.sum()
    assert (counts[expected == 0] == 0).all()
    inside = expected > 0
    found = ((counts - expected)[inside].square() / expected[inside]).sum()
    freedom = int(inside.sum()) - 1
    return (found - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("num_patches", [2, 3, 9, 16])
@pytest.mark.parametrize("paired", [True, False])
def test_shapley_coalitions_have_the_sizes_of_the_shapley_kernel_exactly(num_patches, paired):
    keep = shapley_coalitions(torch.arange(4000), num_patches, 6, seed=3, paired=paired)
    assert keep.shape == (4000, 6, num_patches)
    assert keep.dtype == torch.bool
    for drawn in (keep[:, :1], keep[:, 4:5], keep[:, ::2]):  # independent ones: pairs have sizes k and N − k
        counts = drawn.sum(-1).flatten().bincount(minlength=num_patches + 1)
        if num_patches == 2:
            assert counts.tolist() == [0, counts.sum(), 0]
        else:
            assert distance(counts, references.shapley_sizes(num_patches)) < 5


@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
@pytest.mark.parametrize("paired", [True, False])
def test_coalitions_of_any_power_have_the_sizes_that_it_asks_for(power, paired):
    keep = shapley_coalitions(torch.arange(4000), 9, 6, seed=3, paired=paired, power=power)
    for drawn in (keep[:, :1], keep[:, 4:5], keep[:, ::2]):
        counts = drawn.sum(-1).flatten().bincount(minlength=10)
        assert distance(counts, references_anyhead.coalition_sizes(9, power)) < 5
    if power == 0:
        assert distance(keep[:, 0].sum(-1).bincount(minlength=10), [0, *[1 / 8] * 8, 0]) < 5
    if power == 1:
        assert torch.equal(keep, shapley_coalitions(torch.arange(4000), 9, 6, seed=3, paired=paired))


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


def test_a_new_purpose_changes_no_draw_and_shares_no_seed(monkeypatch):
    def drawn():
        seeds = {purpose: [stream(purpose, seed, epoch) for seed in (0, 3) for epoch in (0, 9)] for purpose in before}
        return seeds, [uniform(torch.arange(4), seed).tolist() for each in seeds.values() for seed in each]

    before = list(sampling.SEEDS)
    seeds, numbers = drawn()
    assert [each[3] for each in seeds.values()] == [  # as they have always been
        *(4 * 300_018 + place for place in range(4)),
        *(-1 - 2 * 300_018 - place for place in range(2)),
    ]
    added = {f"new {number}": (2**30 + number * 2**28, 1) for number in range(10)}
    monkeypatch.setattr(sampling, "SEEDS", sampling.SEEDS | added)
    assert drawn() == (seeds, numbers)
    ends = torch.cat([torch.arange(20_000), 2**28 - 1 - torch.arange(20_000), torch.randint(2**28, (20_000,))]).unique()
    of_all = [(stream(purpose, 0, 0) + sampling.SEEDS[purpose][1] * ends) % 2**32 for purpose in sampling.SEEDS]
    assert len(of_all) == 16 and len(torch.cat(of_all).unique()) == 16 * len(ends)


def test_random_coalitions_have_every_size_equally_often():
    keep = random_coalitions(torch.arange(4000), 9, 3, seed=3)
    assert keep.shape == (4000, 3, 9)
    assert keep.dtype == torch.bool
    for m in range(3):
        assert distance(keep[:, m].sum(-1).bincount(minlength=10), [0.1] * 10) < 5


@pytest.mark.parametrize("num_patches", [4, 9, 16, 49])
def test_coalitions_of_regions_have_every_size_from_1_to_all_but_1_equally_often(num_patches):
    keep = region_coalitions(torch.arange(4000), num_patches, 3, seed=3)
    assert keep.shape == (4000, 3, num_patches)
    assert keep.dtype == torch.bool
    sizes = [0, *[1 / (num_patches - 1)] * (num_patches - 1), 0]
    for m in range(3):
        assert distance(keep[:, m].sum(-1).bincount(minlength=num_patches + 1), sizes) < 5


@pytest.mark.parametrize("num_patches", [4, 9, 196])
def test_every_patch_is_in_half_of_the_coalitions_of_regions(num_patches):
    keep = region_coalitions(torch.arange(3000), num_patches, 2, seed=1).flatten(0, 1)
    assert (keep.double().mean(0) - 0.5).abs().max() < 5 * (0.25 / len(keep)) ** 0.5


def test_small_regions_do_not_prefer_the_border_of_the_image():
    """Where an interpolation repeats its last values, small coalitions lie at the border, two to six times as often."""
    keep = region_coalitions(torch.arange(4000), 196, 4, seed=1).flatten(0, 1)
    small = keep[keep.sum(-1) < 20].float().mean(0).view(14, 14)
    ring = torch.ones(14, 14, dtype=torch.bool)
    ring[1:-1, 1:-1] = False
    corners = small[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert 0.8 < small[ring].mean() / small.mean() < 1.25
    assert 0.6 < corners.mean() / small.mean() < 1.5


@pytest.mark.parametrize("side", [3, 7, 14])
def test_neighbours_are_in_one_region_more_often_than_patches_drawn_one_by_one_and_far_ones_are_not(side):
    regions, alone = (
        draw(torch.arange(1500), side**2, 2, seed=1).unflatten(-1, (side, side))
        for draw in (region_coalitions, partial(shapley_coalitions, paired=False, power=0))
    )

    def together(keep, down, right):
        """How often two patches so far apart are both in the coalition, or both not."""
        return (keep[..., down:, right:] == keep[..., : side - down, : side - right]).float().mean()

    for down, right in ((0, 1), (1, 0)):
        assert together(regions, down, right) > together(alone, down, right) + 0.05
    assert together(regions, side - 1, side - 1) < together(alone, side - 1, side - 1) + 0.02


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


@pytest.mark.parametrize("draw", [random_coalitions, shapley_coalitions, region_coalitions])
def test_an_image_draws_the_same_coalitions_alone_as_in_a_batch_and_others_in_another_epoch(draw):
    index = torch.tensor([3, 1_281_166, 0, 2**35])
    together = draw(index, 49, 4, 9)
    assert torch.equal(together, torch.cat([draw(index[i : i + 1], 49, 4, 9) for i in range(4)]))
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, draw(index, 49, 4, 10))


@pytest.mark.parametrize("draw", [shapley_coalitions, region_coalitions])
def test_a_single_patch_is_refused_where_the_empty_coalition_and_the_full_one_do_not_count(draw):
    with pytest.raises(InputError, match="^expected coalitions of at least 2 patches, got 1: take smaller patches$"):
        draw(torch.arange(3), 1, 2, seed=0)
