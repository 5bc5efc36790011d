import numpy as np
import pytest
import references_localization as slow
import torch
from sklearn.metrics import accuracy_score, average_precision_score, jaccard_score
from torch.nn import functional as F

from explainers.metrics.localization import (
    LOCALIZATIONS,
    THRESHOLDS,
    BoxAccuracy,
    PointingGame,
    Segmentation,
    average_precision,
    box_hits,
    hits,
    segmentation,
)
from explainers.metrics.means import collect_scores, numbers


def peak_at(row, column, side):
    heatmap = torch.rand(side, side)
    heatmap[row, column] = 2
    return heatmap


@pytest.fixture
def heatmaps():
    """Six of 4 × 8 patches: three without ties, two with many, one of equal scores."""
    distinct, tied = torch.randn(3, 4, 8), torch.randint(-1, 2, (2, 4, 8)).float()
    return torch.cat([distinct, tied, torch.full((1, 4, 8), 0.3)])


@pytest.fixture
def truth(heatmaps):
    """Objects in images of 8 × 16 pixels, some of them where the heatmap is high."""
    pixels = F.interpolate(heatmaps[:, None], (8, 16))[:, 0]
    return pixels + 2 * torch.randn(6, 8, 16) > torch.tensor([0.0, 1, -1, 0, 2, 0])[:, None, None]


def located(heatmaps, truth, names=("pointing_game", "average_precision", "segmentation")):
    """The numbers of an evaluation."""
    metrics = {name: LOCALIZATIONS[name]() for name in names}
    for metric in metrics.values():
        metric.update(heatmaps, truth)
    return numbers(metrics, collect_scores(metrics))


def mean_and_error(values):
    return np.mean(values), np.std(values, ddof=1) / len(values) ** 0.5


def test_tied_peaks_share_the_hit(heatmaps, truth):
    found = hits(heatmaps, truth)
    assert found.tolist() == pytest.approx([slow.hit(*pair) for pair in zip(heatmaps, truth, strict=True)])
    assert found[-1] == pytest.approx(truth[-1, 1::2, 1::2].float().mean())  # equal scores: the centres on the object
    assert 0 < found[-1] < 1


def test_images_without_an_object_do_not_count():
    heatmaps = torch.stack([peak_at(1, 3, 4), peak_at(3, 1, 4), peak_at(0, 0, 4), peak_at(2, 2, 4)])
    truth = torch.zeros(4, 32, 32, dtype=torch.bool)
    truth[0, 8:16, 24:32] = True  # hit
    truth[1, 8:16, 24:32] = True  # missed: the mirror image of the peak
    truth[3, 0:8] = True  # missed
    metric = PointingGame()
    metric.update(heatmaps, truth)
    assert metric.compute() == pytest.approx(1 / 3)
    assert metric.standard_error() == pytest.approx(1 / 3)  # the root of (1/3 · 2/3) / 2
    assert metric.rows().isnan().flatten().tolist() == [False, False, True, False]


def test_average_precision_is_that_of_all_pixels(heatmaps, truth):
    found = average_precision(heatmaps, truth).tolist()
    flat = [
        (slow.nearest(heatmap, 8, 16), mask.flatten().tolist()) for heatmap, mask in zip(heatmaps, truth, strict=True)
    ]
    assert found == pytest.approx([slow.average_precision(*pair) for pair in flat], abs=1e-12)
    assert found == pytest.approx([average_precision_score(labels, scores) for scores, labels in flat], abs=1e-12)
    assert found[-1] == pytest.approx(truth[-1].double().mean().item(), abs=1e-12)  # equal scores: chance
    assert len(set(found)) == 6


def test_images_may_be_oblong():
    heatmap, truth = torch.randn(1, 2, 2), torch.rand(1, 4, 10) < 0.4
    expected = slow.average_precision(slow.nearest(heatmap[0], 4, 10), truth.flatten().tolist())
    assert average_precision(heatmap, truth).item() == pytest.approx(expected, abs=1e-12)
    truth[:] = False
    truth[0, 1, 7] = True  # the centre of the upper right patch
    assert hits(torch.tensor([[[0, 1], [0, 0]]]), truth).item() == 1


def test_segmentation_is_that_of_the_released_code_pixel_by_pixel(heatmaps, truth):
    found = torch.stack(segmentation(heatmaps, truth), 1)
    for (intersection, union, precision), heatmap, mask in zip(found.tolist(), heatmaps, truth, strict=True):
        correct, (_, areas), expected = slow.segmented(heatmap, mask)
        assert (intersection * 128, union * 128) == pytest.approx(areas)
        assert 1 + intersection - union == pytest.approx(correct / 128)
        assert precision == pytest.approx(expected, abs=1e-12)


def test_segmentation_agrees_with_scikit_learn_where_weights_of_interpolation_are_inexact():
    heatmaps = torch.cat([torch.randn(1, 5, 5), 0.3 * torch.randint(-1, 2, (1, 5, 5))])
    truth = torch.rand(2, 70, 70) < 0.3
    metric = Segmentation()
    metric.update(heatmaps, truth)
    pixels = F.interpolate(heatmaps[:, None].double(), 70, mode="bilinear")
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    res = ((pixels - low) / (high - low)).round(decimals=9)
    labels, predicted = truth.flatten(), (res > res.mean((2, 3), keepdim=True)).flatten()
    planes = torch.cat([1 - res, res], 1).round(decimals=9).flatten(1)
    classes = torch.stack([~truth, truth], 1).flatten(1)
    expected = {
        "pixel_accuracy": accuracy_score(labels, predicted),
        "mean_iou": jaccard_score(labels, predicted, average="macro"),
        "mean_average_precision": np.mean(
            [average_precision_score(*pair) for pair in zip(classes, planes, strict=True)]
        ),
    }
    found = metric.compute()
    assert {name: found[name].item() for name in expected} == pytest.approx(expected, abs=1e-7)


def test_equal_scores_segment_nothing():
    scores = torch.tensor([-0.4338788092136383, 0.8487103581428528, 0.1])  # interpolation rounds the first two
    heatmaps, truth = scores.view(3, 1, 1).expand(3, 5, 5), torch.rand(3, 70, 70) < 0.3
    intersection, union, precision = segmentation(heatmaps, truth)
    assert intersection.tolist() == [0] * 3
    assert union.tolist() == pytest.approx(truth.double().mean((1, 2)).tolist())
    assert precision.tolist() == pytest.approx([0.5] * 3)


def test_a_batch_has_the_numbers_and_errors_of_the_loops(heatmaps, truth):
    found = located(heatmaps, truth)
    pairs = list(zip(heatmaps, truth, strict=True))
    correct, areas, precision = zip(*[slow.segmented(*pair) for pair in pairs], strict=True)
    ranked = [slow.average_precision(slow.nearest(heatmap, 8, 16), mask.flatten().tolist()) for heatmap, mask in pairs]
    expected = {
        "pointing_game": mean_and_error([slow.hit(*pair) for pair in pairs]),
        "average_precision": mean_and_error(ranked),
        "pixel_accuracy": mean_and_error([count / 128 for count in correct]),
        "mean_iou": slow.mean_iou(areas),
        "mean_average_precision": mean_and_error(precision),
    }
    of_images = expected.keys() - {"mean_iou"}
    assert found.keys() == {*expected, *(f"{name}_error" for name in expected), *(f"{name}_sd" for name in of_images)}
    for name, values in expected.items():
        assert (found[name], found[f"{name}_error"]) == pytest.approx(values, rel=1e-6), name


def test_without_any_object_there_is_nothing_to_measure(heatmaps):
    nothing = torch.zeros(6, 8, 8, dtype=torch.bool)
    assert located(heatmaps, nothing, list(LOCALIZATIONS)) == {}
    assert all(numbers.isnan().all() for numbers in segmentation(heatmaps, nothing))


def planted(row, column, size=3, side=7, pixels=28):
    """A hot square of patches, and an object at another place if it is moved."""
    heatmap, truth = torch.zeros(side, side), torch.zeros(pixels, pixels, dtype=torch.bool)
    heatmap[row : row + size, column : column + size] = 1
    scale = pixels // side
    truth[row * scale : (row + size) * scale, column * scale : (column + size) * scale] = True
    return heatmap, truth


@pytest.mark.parametrize(("row", "column"), [(0, 4), (1, 3)])
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
    metric.update(heatmaps[[0, 1, 2, 2]], torch.cat([truth, none]))
    found = metric.compute()
    assert found["box_accuracy"] == pytest.approx(2 / 3) and found["box_accuracy_error"] == pytest.approx(1 / 3)
    assert metric.scores("box_accuracy")["box_accuracy"].tolist() == pytest.approx([1, 1, 0, torch.nan], nan_ok=True)
    means = box_hits(heatmaps, truth).mean(0)
    assert means.max() == pytest.approx(2 / 3) and means.min() == 0 and len(means) == len(THRESHOLDS)


def test_equal_scores_are_the_whole_image():
    truth = torch.zeros(2, 28, 28, dtype=torch.bool)
    truth[0, :20] = True
    truth[1, :5] = True
    assert located(torch.full((2, 7, 7), 0.3), truth, ["box_accuracy"])["box_accuracy"] == 0.5
