"""Class activation mapping, against HiResCAM of the last feature map."""

import pytest
import torch
from conftest import timm_model

from explainers import posthoc
from explainers.masking import PatchGrid
from explainers.models import TargetModel

GRID = PatchGrid(160, 32, differs=True)
CLASSES = torch.tensor([3, 0])


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (2, 3, 160, 160), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("output", ["logit", "probability", "log_odds"])
def test_it_is_gradient_times_value_of_the_last_feature_map(pixels, output):
    target = timm_model("test_resnet", as_target=True)
    expected = posthoc.HiResCAM(target, GRID, output, layer=-1)(pixels, CLASSES)
    torch.testing.assert_close(posthoc.CAM(target, GRID, output)(pixels, CLASSES), expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_scores_sum_to_the_functional_on_any_grid(pixels):
    target = timm_model("test_resnet", as_target=True)
    explainer = posthoc.CAM(target, PatchGrid(160, 20, differs=True))
    functional = torch.randn(2, target.embed_dim, generator=torch.Generator().manual_seed(1))
    expected = (target.embed(target.normalise(pixels)) * functional).sum(-1)
    found = explainer.explain(pixels, functional)
    assert found.shape == (2, 8, 8)
    torch.testing.assert_close(found.sum((1, 2)), expected, rtol=1e-4, atol=1e-5)


def test_a_model_without_a_head_has_vectors(pixels):
    model = timm_model("test_resnet")
    model.reset_classifier(0)
    vectors, embeddings = posthoc.CAM(TargetModel(model).eval(), GRID).decompose(pixels)
    torch.testing.assert_close(vectors.sum(1), embeddings, rtol=1e-4, atol=1e-5)
