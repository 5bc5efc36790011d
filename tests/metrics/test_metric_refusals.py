"""What cannot be measured is refused in one line, which names the setting or the argument."""

import sys

import pytest
import torch
from refusals import check_refused

from explainers.evaluation import Evaluation
from explainers.evaluation.measurement import Measurement
from explainers.masking import PatchGrid
from explainers.metrics.localization import average_precision, box_hits, hits, segmentation
from explainers.metrics.pairs import paired_differences
from explainers.metrics.perturbation import PerturbationCurves
from explainers.models import TargetModel

HEATMAPS, THREE, FLOATS = torch.rand(2, 4, 4), torch.ones(3, 8, 8, dtype=torch.bool), torch.ones(2, 8, 8)


def measure_confidence(make_model):
    target = TargetModel(make_model(num_classes=2), score="value").eval()
    Measurement(target, {}, Evaluation(PatchGrid(32, 8), probes=["arcc"]))


def compare_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    paired_differences(torch.zeros(3, 2))


REFUSED = [
    ("levels", lambda: PerturbationCurves(16, ["deletion"], levels=2, empty=False)),
    ("until", lambda: PerturbationCurves(16, ["deletion"], until=0.02)),
    ("until", lambda: PerturbationCurves(16, ["deletion"], until=1.2)),
    ("truth", lambda: hits(HEATMAPS, THREE)),
    ("truth", lambda: average_precision(HEATMAPS, FLOATS)),
    ("truth", lambda: segmentation(HEATMAPS, THREE)),
    ("truth", lambda: box_hits(HEATMAPS, FLOATS)),
    ("probes", measure_confidence),
    ("scipy", compare_without_scipy),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_cannot_be_measured_is_refused(told, call, request):
    check_refused(request, told, call)
