import pytest
import torch

from explainers.runtime import sampling
from explainers.runtime.sampling import random_patches, stream, uniform


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


@pytest.mark.parametrize("start", [0, 2**33 + 1])
def test_patches_of_an_image_are_different_and_in_the_grid(start):
    patches = random_patches(start + torch.arange(500), num_patches=49, count=7, seed=2)
    assert patches.shape == (500, 7)
    assert patches.min() >= 0
    assert patches.max() < 49
    assert all(len(set(row)) == 7 for row in patches.tolist())


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
