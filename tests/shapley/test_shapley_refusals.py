"""Networks, surrogates and coalitions that do not fit are refused in one line, which names the setting or the model."""

from functools import partial

import pytest
import torch
from refusals import check_refused

from explainers.masking import PatchGrid
from explainers.refinement.coalitions import region_coalitions
from explainers.shapley import (
    FastSHAPNetwork,
    LightShapleyNetwork,
    Shapley,
    ShapleyLabels,
    Surrogate,
    ViTShapleyNetwork,
)
from explainers.shapley.coalition_draws import shapley_coalitions

LIGHT = partial(LightShapleyNetwork, blocks=[0], width=12, depth=1)
COARSE = PatchGrid(32, 16, differs=True)
ONE = torch.arange(3)


@pytest.fixture
def surrogate(target, grid, tmp_path):
    """The file of a surrogate of a model with 5 classes."""
    Surrogate(target, grid, torch.optim.Adam).export(tmp_path)
    return str(tmp_path / "target.safetensors")


REFUSED = [
    ("test_resnet", lambda make_target, grid: Shapley(make_target("test_resnet"), grid, ViTShapleyNetwork)),
    ("4 × 4", lambda target: Shapley(target, COARSE, ViTShapleyNetwork)),
    ("test_resnet", lambda target: FastSHAPNetwork(target, PatchGrid(32, 1, differs=True), "test_resnet")),
    ("nowhere", lambda target, grid: Shapley(target, grid, LIGHT, surrogate="nowhere.safetensors")),
    ("7", lambda make_target, grid, surrogate: Shapley(make_target(num_classes=7), grid, LIGHT, surrogate=surrogate)),
    ("cache", lambda target, grid: Surrogate(target, grid, torch.optim.Adam).sources),
    ("prior", lambda target, grid: ShapleyLabels(target, grid, classes="all", prior="DecompX-PLUS")),
    ("patches", lambda: shapley_coalitions(ONE, 1, 2, seed=0)),
    ("patches", lambda: region_coalitions(ONE, (1, 1), 2, seed=0)),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_does_not_fit_is_refused(told, call, request):
    check_refused(request, told, call)
