import math
import statistics
from functools import partial

import pytest
import torch

from explainers.metrics.agreement import (
    BestFactor,
    RankCorrelation,
    RelativeError,
    RootMeanSquaredError,
    TopOverlap,
)
from explainers.metrics.cost import Cost, Passes
from explainers.metrics.curves import CURVES, QUANTITIES
from explainers.metrics.error_bound import ErrorBound
from explainers.metrics.localization import AveragePrecision, BoxAccuracy, PointingGame, Segmentation
from explainers.metrics.means import Accuracy, MeanOfImages, collect_scores, moments, numbers
from explainers.metrics.perturbation import PerturbationCurves


class Given(MeanOfImages):
    def update(self, values):
        self.add(values)


VALUES = torch.tensor([3.0, torch.nan, 1.0, 0.5, torch.nan, 7.0])


def test_moments_are_those_of_the_known_numbers_of_each_column():
    numbers = torch.stack([VALUES, torch.full((6,), torch.nan), torch.tensor([2.0, *[torch.nan] * 5])], 1)
    mean, deviation, error = (column.tolist() for column in moments(numbers.double()))
    known = [value for value in VALUES.tolist() if value == value]
    assert mean[0] == pytest.approx(statistics.mean(known)) and mean[2] == 2
    assert deviation[0] == pytest.approx(statistics.stdev(known))
    assert error[0] == pytest.approx(statistics.stdev(known) / math.sqrt(4))
    assert all(map(math.isnan, [mean[1], *deviation[1:], *error[1:]]))


def test_each_image_keeps_its_place_in_every_metric():
    """Where an image has no number, in batches of uneven size, and of a second process."""
    one, other, nothing = Given(), Given(), Given()
    one.update(VALUES[:1])
    one.update(VALUES[1:4])
    other.update(VALUES[4:])
    other.merge_state(one)
    metrics = {"given": other, "nothing": nothing, "pointing_game": PointingGame(), "segmentation": Segmentation()}
    shares = torch.rand(6, 4, 2, 3)
    shares[2] = torch.nan
    metrics["curves"] = PerturbationCurves(4, ["deletion", "aopc"], levels=3, removal="drop")
    metrics["curves"].update(shares)
    heatmaps, truth = torch.rand(6, 2, 2), torch.ones(6, 4, 4, dtype=torch.bool)
    truth[3] = False
    metrics["pointing_game"].update(heatmaps, truth), metrics["segmentation"].update(heatmaps, truth)
    scores = collect_scores(metrics)
    assert scores.pop("nothing").tolist() == []
    torch.testing.assert_close(scores["given"], VALUES.double(), equal_nan=True)
    one.kept = VALUES.double()  # as torchmetrics joins the states of processes
    torch.testing.assert_close(one.rows()[:, 0], scores["given"], equal_nan=True)
    for name, missing in {"deletion_drop": 2, "aopc_drop": 2, "pixel_accuracy": 3, "pointing_game": 3}.items():
        assert scores[name].isnan().nonzero().flatten().tolist() == [missing], name
    assert "mean_iou" not in scores  # of all images together


def test_numbers_have_standard_deviations_of_images_beside_the_errors_of_means():
    metrics = {"given": Given(), "one": Given(), "nothing": Given(), "segmentation": Segmentation()}
    metrics["given"].update(VALUES)
    metrics["one"].update(VALUES[:2])
    metrics["segmentation"].update(torch.rand(5, 2, 2), torch.rand(5, 4, 4) < 0.5)
    found = numbers(metrics, collect_scores(metrics))
    assert found["one"] == 3 and not {"one_sd", "one_error", "nothing", "nothing_sd"} & found.keys()
    assert found["given_sd"] == pytest.approx(found["given_error"] * 2)  # the root of 4 known images
    assert found["pixel_accuracy_sd"] == pytest.approx(found["pixel_accuracy_error"] * math.sqrt(5))
    assert "mean_iou_error" in found and "mean_iou_sd" not in found


def test_accuracy_counts_labelled_images_alone():
    predicted, metric, unlabelled = torch.tensor([0, 1, 2, 0, 1, 2]), Accuracy(), Accuracy()
    metric.update(predicted, torch.tensor([0, 1, 1, -1, -1, 2]))
    unlabelled.update(predicted, torch.full((6,), -1))
    assert metric.compute().item() == pytest.approx(3 / 4) and unlabelled.compute().isnan()


def test_costs_have_the_largest_memory_and_passes_of_no_image_are_none():
    cost = Cost()
    for memory in (0.5, 2.0, 1.0):
        cost.update(images=4, seconds=0.5, memory=memory)
    assert cost.compute() == {"images_per_second": 8, "peak_memory": 2} and Passes().compute() == 0


HEATMAPS, LABELS = torch.randn(2, 5, 4, 4), torch.tensor([0, -1, 1, 4, -1])
SWEEP = torch.rand(5, len(QUANTITIES), 2, 7).index_fill(1, torch.arange(3, 6), torch.nan)
SWEEP[2:4, 3:] = torch.rand(2, 3, 2, 7)  # two labelled images
METRICS = {
    Accuracy: (torch.tensor([0, 1, 2, 4, 1]), LABELS),
    AveragePrecision: (HEATMAPS[0], HEATMAPS[1] > 0),
    BestFactor: HEATMAPS,
    BoxAccuracy: (HEATMAPS[0], HEATMAPS[1] > 0),
    ErrorBound: (-HEATMAPS[0, ..., :2].abs() / 9, -HEATMAPS[1, ..., :2].abs() / 9),
    partial(PerturbationCurves, 16, list(CURVES), 7): (SWEEP,),
    PointingGame: (HEATMAPS[0], HEATMAPS[1] > 0),
    RankCorrelation: HEATMAPS,
    RelativeError: HEATMAPS,
    RootMeanSquaredError: HEATMAPS,
    Segmentation: (HEATMAPS[0], HEATMAPS[1] > 0),
    partial(TopOverlap, 6): HEATMAPS,
}


@pytest.mark.parametrize("build", METRICS, ids=lambda build: getattr(build, "func", build).__name__)
def test_uneven_batches_of_two_processes_give_what_one_batch_gives(build):
    one, first, second = build(), build(), build()
    one.update(*METRICS[build])
    for metric, some in ((first, slice(0, 1)), (second, slice(1, 2)), (second, slice(2, 5))):
        metric.update(*(tensor[some] for tensor in METRICS[build]))
    first.merge_state(second)
    torch.testing.assert_close(first.compute(), one.compute())
    if isinstance(one, MeanOfImages):
        torch.testing.assert_close(first.standard_error(), one.standard_error())
