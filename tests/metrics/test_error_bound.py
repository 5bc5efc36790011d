"""Theorem 1 of TVE."""

import pytest
import references
import torch

from explainers.metrics.error_bound import LIMIT, ErrorBound, error_bound


def draws(shape=(7, 3), spread=0.3, seed=0):
    """Log-probabilities of ĝ and ĥ, and of g and h; `spread` is how far they are from each other."""
    generator = torch.Generator().manual_seed(seed)
    exact = -4 * torch.rand(*shape, 2, generator=generator)
    return (exact + spread * torch.randn(*shape, 2, generator=generator)).clamp(max=0), exact


def rows(predicted, exact):
    """What the slow version says of every patch."""
    pairs = zip(predicted.flatten(0, -2).exp().tolist(), exact.flatten(0, -2).exp().tolist(), strict=True)
    return [references.error_bound(*pair) for pair in pairs]


@pytest.mark.parametrize("spread", [0.01, 0.3])
def test_epsilon_bound_and_error_are_those_of_loops(spread):
    predicted, exact = draws(spread=spread)
    predicted[0, 0], exact[0, 0] = torch.tensor([[0.0, -1.0], [-1.0, -1.0]])  # ε is above 1: the bound is infinite
    expected = torch.tensor(rows(predicted, exact)).unflatten(0, (7, 3)).unbind(-1)
    for got, wanted in zip(error_bound(predicted, exact), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert expected[1].isinf()[0, 0] and not expected[1].isinf().all()


@pytest.mark.parametrize("seed", [0, 4])
def test_no_attribution_is_further_off_than_its_bound(seed):
    epsilon, bound, error = error_bound(*draws((5000,), spread=10 ** (seed / 2 - 2), seed=seed))
    assert (error <= bound * (1 + 1e-5) + 1e-5).all()  # nearly all of it float32
    assert (epsilon < 1).sum() > 500


def test_the_metric_takes_the_means_over_the_patches_that_are_covered():
    predicted, exact = draws(spread=0.5)
    metric = ErrorBound()
    metric.update(predicted, exact)
    covered = [row for row in rows(predicted, exact) if row[0] <= LIMIT]
    assert 0 < len(covered) < 21
    means = [sum(column) / len(covered) for column in zip(*covered, strict=True)]
    expected = dict(zip(("epsilon", "bound", "error"), means, strict=True)) | {"covered": len(covered) / 21}
    assert {name: value.item() for name, value in metric.compute().items()} == pytest.approx(expected, rel=1e-4)


def test_where_no_patch_is_covered_there_are_no_means():
    metric = ErrorBound()
    metric.update(torch.zeros(4, 2), torch.full((4, 2), -torch.inf))
    found = metric.compute()
    assert found.pop("covered") == 0
    assert all(value.isnan() for value in found.values())
