import pytest
import torch
from scipy.stats import spearmanr

from explainers.metrics.agreement import (
    BestFactor,
    RankCorrelation,
    RelativeError,
    iou_at_k,
    spearman,
)


def overlap(first, second, k):
    """IoU@K of two lists of scores; those that tie for the last places share them."""

    def chosen(scores):
        last = sorted(scores, reverse=True)[k - 1]
        above, ties = sum(score > last for score in scores), scores.count(last)
        return [1 if score > last else (k - above) / ties if score == last else 0 for score in scores]

    common = sum(one * other for one, other in zip(chosen(first), chosen(second), strict=True))
    return common / (2 * k - common)


@pytest.mark.parametrize("values", [1000, 3])  # how many different ones there are: many ties with few
def test_rank_correlation_is_scipys(values):
    first, second = torch.randint(0, values, (6, 25)).float(), torch.randint(0, values, (6, 25)).float()
    second[0] = first[0]
    second[1] = -first[1]
    second[2] = first[2] + second[2] / 2
    got = spearman(first, second)
    expected = [spearmanr(first[i].numpy(), second[i].numpy()).statistic for i in range(6)]
    torch.testing.assert_close(got, torch.tensor(expected))
    assert got[0] == pytest.approx(1)
    assert got[1] == pytest.approx(-1)


def test_a_constant_heatmap_counts_as_uncorrelated_and_a_constant_reference_is_left_out():
    heatmaps, reference = torch.randn(6, 4, 4), torch.randn(6, 4, 4)
    heatmaps[3], reference[4:], heatmaps[5] = 1, 2, 1
    metric = RankCorrelation()
    metric.update(heatmaps, reference)
    expected = [spearmanr(heatmaps[i].flatten(), reference[i].flatten()).statistic for i in range(3)]
    assert metric.compute().item() == pytest.approx(sum(expected) / 4, abs=1e-6)


@pytest.mark.parametrize(("values", "k"), [(1000, 5), (1000, 25), (3, 1), (2, 24)])  # few different ones: many ties
def test_iou_at_k_is_of_the_sets_of_the_most_important_patches(values, k):
    first, second = torch.randint(0, values, (6, 25)).float(), torch.randint(0, values, (6, 25)).float()
    second[0] = first[0]
    second[1] = -first[1]
    found = iou_at_k(first, second, k)
    assert found.tolist() == pytest.approx([overlap(first[i].tolist(), second[i].tolist(), k) for i in range(6)])
    assert found[0] == 1 or values < 1000 or k == 25


def test_the_relative_error_of_a_constant_is_1_and_of_a_multiple_its_distance_from_1():
    reference = torch.randn(5, 4, 4) * torch.rand(5, 1, 1)
    means = reference.mean((1, 2), keepdim=True)
    for heatmaps, expected in ((means.expand(5, 4, 4), 1.0), (means + 1.5 * (reference - means), 0.5), (reference, 0)):
        metric = RelativeError()
        metric.update(heatmaps, reference)
        assert metric.compute().item() == pytest.approx(expected, abs=1e-6)


def test_the_best_factor_has_the_least_error_of_all():
    heatmaps, reference = torch.randn(5, 4, 4), torch.randn(5, 4, 4)
    metric = BestFactor()
    metric.update(heatmaps, reference)
    best = metric.compute()
    errors = [((best + step) * heatmaps - reference).square().sum().item() for step in (-0.01, 0, 0.01)]
    assert errors[1] == min(errors)
