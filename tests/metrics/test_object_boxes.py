"""The box around the hottest region, against the object's box."""

import pytest
import references_localization as slow
import torch
from torch.nn import functional as F

from explainers.metrics.localization import THRESHOLDS, BoxAccuracy, Localization, box_hits


def planted(row, column, size=3, side=7, pixels=28):
    """A hot square of patches, and an object at another place if it is moved."""
    heatmap, truth = torch.zeros(side, side), torch.zeros(pixels, pixels, dtype=torch.bool)
    heatmap[row : row + size, column : column + size] = 1
    scale = pixels // side
    truth[row * scale : (row + size) * scale, column * scale : (column + size) * scale] = True
    return heatmap, truth


@pytest.mark.parametrize(("row", "column"), [(0, 4), (4, 0), (1, 3)])
def test_a_planted_square_is_found_where_it_is_and_not_mirrored(row, column):
    heatmap, truth = planted(row, column)
    assert box_hits(heatmap[None], truth[None], [0.5]).tolist() == [[1]]
    assert box_hits(heatmap.T[None], truth[None], [0.5]).tolist() == [[0]]
    assert box_hits(heatmap[None], truth[None], [0]).tolist() == [[0]]  # the whole image


def test_hits_are_those_of_the_loops():
    distinct, tied = torch.randn(4, 4, 4), torch.randint(-1, 2, (4, 4, 4)).float()
    heatmaps = torch.cat([distinct, tied])
    truth = F.interpolate(heatmaps[:, None], 8)[:, 0] + 0.5 * torch.randn(8, 8, 8) > 0.8
    thresholds = [0.05, 0.3, 0.5, 0.75, 0.9]
    expected = [
        [slow.box_hit(heatmap, mask, threshold) for threshold in thresholds]
        for heatmap, mask in zip(heatmaps, truth, strict=True)
    ]
    assert box_hits(heatmaps, truth, thresholds).bool().tolist() == expected
    assert 0 < sum(map(sum, expected)) < 40


def test_only_the_largest_region_counts_and_any_box_of_the_object_may_be_hit():
    large, truth = planted(0, 0)
    small, other = planted(5, 5, size=2)
    assert box_hits((large + small)[None], truth[None], [0.5]) == 1
    assert box_hits((large + small)[None], other[None], [0.5]) == 0
    assert box_hits((large + small)[None], (truth | other)[None], [0.5]) == 1


def test_the_accuracy_is_that_of_the_best_threshold():
    heatmaps, truth = map(torch.stack, zip(planted(0, 4), planted(4, 0), planted(1, 3), strict=True))
    truth[2] = planted(4, 4)[1]
    none = torch.zeros(1, 28, 28, dtype=torch.bool)
    metric = BoxAccuracy()
    metric.update(heatmaps[:2], truth[:2])
    metric.update(heatmaps[[2, 2]], torch.cat([truth[2:], none]))
    found = metric.compute()
    assert found["box_accuracy"] == pytest.approx(2 / 3) and found["box_accuracy_error"] == pytest.approx(1 / 3)
    assert metric.scores("box_accuracy")["box_accuracy"].tolist() == pytest.approx([1, 1, 0, torch.nan], nan_ok=True)
    means = box_hits(heatmaps, truth).mean(0)
    assert means.max() == pytest.approx(2 / 3) and means.min() == 0 and len(means) == len(THRESHOLDS)


def test_equal_scores_are_the_whole_image():
    truth = torch.zeros(2, 28, 28, dtype=torch.bool)
    truth[0, :20] = True
    truth[1, :5] = True
    metric = Localization(["box_accuracy"])
    metric.update(torch.full((2, 7, 7), 0.3), truth)
    assert metric.compute()["box_accuracy"] == 0.5


def test_two_processes_measure_what_one_does():
    heatmaps, truth = map(torch.stack, zip(*[planted(i % 4, (2 * i) % 4) for i in range(6)], strict=True))
    heatmaps += 0.5 * torch.rand(6, 7, 7)
    one, first, second = BoxAccuracy(), BoxAccuracy(), BoxAccuracy()
    one.update(heatmaps, truth)
    first.update(heatmaps[:2], truth[:2])
    second.update(heatmaps[2:], truth[2:])
    first.merge_state(second)
    assert first.compute() == one.compute()
