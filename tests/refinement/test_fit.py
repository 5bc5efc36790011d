"""The ridge regression of pairs towards a prior, and its standard errors."""

import itertools

import pytest
import references
import references_refinement as slow
import torch

from explainers.refinement.coalitions import draw_coalitions, region_coalitions, weigh_pairs
from explainers.refinement.fit import BELIEF, STRENGTHS, fit_pairs

N = 16
SHAPE = 2, 8


def noisy_pairs(count, noise, images, deviation=1.0, seed=0):
    """Coalitions, observed differences (B, M, 1), a prior (B, N, 1), and attributions (B, N) that deviate from it."""
    random = torch.Generator().manual_seed(seed)
    keep = region_coalitions(torch.arange(images), SHAPE, count, seed=seed)
    prior = torch.randn(images, N, 1, generator=random).double()
    truth = 2 * prior[..., 0] + deviation * torch.randn(images, N, generator=random).double()
    signs = 2 * keep.double() - 1
    observed = signs @ truth[..., None] + noise * torch.randn(images, count, 1, generator=random).double()
    return keep, observed, prior, truth


def fitted(keep, observed, prior):
    one = torch.ones(len(keep), 1, dtype=torch.double)
    values, errors = fit_pairs(keep, observed, prior, one).heatmaps(one[:, None])
    return values[:, 0], errors[:, 0]


@pytest.mark.parametrize(("count", "sign"), [(4, 1), (6, 1), (10, 1), (10, -1), (40, 1)])
def test_the_fit_is_the_mean_over_strengths_of_fits_one_by_one(count, sign):
    keep, observed, prior, _ = noisy_pairs(count, noise=2.0, images=2)
    values, errors = fitted(keep, observed, sign * prior)
    for image in range(2):
        arguments = keep[image].tolist(), observed[image, :, 0].tolist(), (sign * prior[image, :, 0]).tolist()
        expected = slow.refined(*arguments, STRENGTHS.tolist(), BELIEF)
        torch.testing.assert_close(values[image], torch.tensor(expected[0]), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(errors[image], torch.tensor(expected[1]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("count", "noise"), [(4, 1.0), (16, 1.0), (100, 4.0)])
@pytest.mark.parametrize("trusted", [True, False])
def test_intervals_hold_the_truth_in_95_of_100_cases(count, noise, trusted):
    keep, observed, prior, truth = noisy_pairs(count, noise, images=200)
    values, errors = fitted(keep, observed, prior * trusted)
    wrong = (values - values.mean(1, keepdim=True)) - (truth - truth.mean(1, keepdim=True))
    assert 0.92 < (wrong.abs() < 1.96 * errors).double().mean() < 0.98


def test_claimed_errors_are_honest_on_nine_patches_where_coalitions_repeat():
    """Of a game whose Shapley values are known, for 600 seeds: 16 pairs have 14 different coalitions, some have 10."""
    random = torch.Generator().manual_seed(0)
    masks = torch.tensor([*itertools.product([False, True], repeat=9)])
    weights, mixture = torch.randn(9, 12, generator=random).double(), torch.randn(12, generator=random).double()
    values = (masks.double() @ weights).tanh() @ mixture
    game = {frozenset(mask.nonzero()[:, 0].tolist()): value for mask, value in zip(masks, values, strict=True)}
    drawn = [draw_coalitions("shapley", 0, 16, torch.zeros(1, 9), (3, 3), seed) for seed in range(600)]
    keep, one = torch.cat(drawn), torch.ones(600, 1)
    number = keep.long() @ 2 ** torch.arange(8, -1, -1)
    observed, total = (values[number] - values[511 - number])[..., None], (values[-1] - values[0]) * one
    fit = fit_pairs(keep, observed, torch.zeros(600, 9, 1), one, total, weigh_pairs("shapley", keep))
    heatmaps, claimed = (each[:, 0] for each in fit.heatmaps(one[:, None]))
    wrong = heatmaps - references.exact_shapley(game, 9)
    ratio = wrong.norm(dim=1) / claimed.norm(dim=1)
    assert 0.92 < (wrong.abs() < 1.96 * claimed).double().mean() < 0.98 and (ratio > 3).double().mean() < 0.01


def test_pairs_that_are_drawn_again_make_no_smaller_errors():
    keep, observed, prior, _ = noisy_pairs(12, noise=1.0, images=20)
    values, errors = fitted(keep, observed, prior)
    again = torch.cat([keep, ~keep], 1), torch.cat([observed, -observed], 1), prior
    torch.testing.assert_close(fitted(*again), (values, errors), rtol=0.2, atol=0.2 * errors.mean().item())


def test_too_few_different_pairs_tell_no_error():
    keep = torch.tensor([[[True, False, False, False]] * 3 + [[False, True, True, True]], torch.eye(4).bool().tolist()])
    observed = torch.tensor([[1.0, 1, 1, -1], [1, -1, 0.5, 2]])[..., None]
    fit = fit_pairs(keep, observed, torch.zeros(2, 4, 1), torch.ones(2, 1))
    values, errors = fit.heatmaps(torch.ones(2, 1, 1))
    assert values.isfinite().all() and errors[0].isinf().all() and errors[1].isfinite().all()


def test_few_pairs_stay_near_a_good_prior_and_many_forget_a_bad_one():
    for count, noise, sign in ((8, 2.0, 1), (300, 1.0, -1)):
        keep, observed, prior, truth = noisy_pairs(count, noise, images=20, deviation=0.3)
        values, _ = fitted(keep, observed, sign * prior)
        none, _ = fitted(keep, observed, torch.zeros_like(prior))
        error, without = ((each - truth).square().mean() for each in (values, none))
        assert error < 0.3 * without if sign > 0 else error < 0.05


def test_a_prior_may_have_any_size_and_offset():
    keep, observed, prior, _ = noisy_pairs(12, noise=1.0, images=3)
    values, errors = fitted(keep, observed, prior)
    for other in (7 + prior, 100 * prior - 3):
        torch.testing.assert_close(fitted(keep, observed, other), (values, errors))


def test_a_constant_prior_is_none():
    keep, observed, prior, _ = noisy_pairs(12, noise=1.0, images=3)
    none = fitted(keep, observed, torch.zeros_like(prior))
    torch.testing.assert_close(fitted(keep, observed, torch.full_like(prior, 0.1)), none)
    torch.testing.assert_close(fitted(keep, observed, torch.full_like(prior, 0.1).float()), none)


def test_columns_that_are_fitted_together_give_what_their_mixture_gives_alone():
    keep, observed, prior, _ = noisy_pairs(12, noise=1.0, images=3)
    mixture = torch.randn(3, 5).double()
    columns = torch.randn(3, 1, 5).double()
    several = columns - columns @ mixture[..., None] * mixture[:, None] / mixture.square().sum(1)[:, None, None]
    along = mixture[:, None] / mixture.square().sum(1)[:, None, None]  # v · along = 1
    fit = fit_pairs(keep, observed @ along + several, prior @ along + several, mixture)
    torch.testing.assert_close(fit.heatmaps(mixture[:, None]), tuple(e[:, None] for e in fitted(keep, observed, prior)))


def test_attributions_may_be_made_to_add_up():
    keep, observed, prior, _ = noisy_pairs(12, noise=1.0, images=3)
    total = torch.tensor([[1.0], [2.0], [-3.0]])
    fit = fit_pairs(keep, observed, prior, torch.ones(3, 1), total)
    torch.testing.assert_close(fit.values.sum(1), total.double())
