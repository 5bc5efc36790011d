"""Accuracy on images of which some have no label."""

import pytest
import torch

from explainers.metrics.accuracy import Accuracy

PREDICTED, LABELS = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 1, 1, -1, -1, 2])


@pytest.mark.parametrize("batches", [(6,), (3, 3), (1, 2, 2, 1)])
def test_only_labelled_images_count_however_they_are_batched(batches):
    metric = Accuracy()
    for predicted, labels in zip(PREDICTED.split(batches), LABELS.split(batches), strict=True):
        metric.update(predicted, labels)
    assert metric.compute().item() == pytest.approx(3 / 4)


def test_without_labelled_images_there_is_no_accuracy():
    metric = Accuracy()
    metric.update(PREDICTED, torch.full((6,), -1))
    assert metric.compute().isnan()
