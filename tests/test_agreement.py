import pytest
import torch
from scipy.stats import spearmanr

from explainers.metrics.agreement import RankCorrelation, spearman


@pytest.mark.parametrize("values", [1000, 3, 2])  # how many different ones there are: many ties with few
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


def test_only_the_order_counts():
    first, second = torch.randn(3, 16), torch.randn(3, 16)
    torch.testing.assert_close(spearman(first.exp(), second**3), spearman(first, second))


def test_a_constant_row_has_no_order_to_compare():
    first, second = torch.randn(2, 16), torch.randn(2, 16)
    second[1] = 0.5
    assert spearman(first, second).isnan().tolist() == [False, True]
    assert spearman(second, first).isnan().tolist() == [False, True]


def test_the_metric_is_the_mean_over_images_that_have_an_order():
    heatmaps, reference = torch.randn(5, 4, 4), torch.randn(5, 4, 4)
    heatmaps[3] = 1
    metric = RankCorrelation(nan_strategy="ignore")
    metric.update(heatmaps[:2], reference[:2])
    metric.update(heatmaps[2:], reference[2:])
    expected = [spearmanr(heatmaps[i].flatten(), reference[i].flatten()).statistic for i in (0, 1, 2, 4)]
    assert metric.compute().item() == pytest.approx(sum(expected) / 4, abs=1e-6)


def test_two_processes_find_the_correlation_of_one():
    heatmaps, reference = torch.randn(5, 4, 4), torch.randn(5, 4, 4)
    one, first, second = RankCorrelation(), RankCorrelation(), RankCorrelation()
    one.update(heatmaps, reference)
    first.update(heatmaps[:1], reference[:1])
    second.update(heatmaps[1:], reference[1:])
    first.merge_state(second)
    torch.testing.assert_close(first.compute(), one.compute())
