"""The projection that restores the embeddings where a vector is added."""

import pytest
import torch
from toys import Marked, validate, vector_module

from explainers.saved.weights import read_weights
from explainers.vectors import exported_target
from explainers.vectors.lambda_sweep import restoration, restore_projection


@pytest.fixture
def embeddings():
    """Embeddings before and after a change that is mostly linear, far from zero."""
    unchanged = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) + 2
    mixed = unchanged @ (torch.eye(6) + 0.2 * torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))
    return mixed + 0.1 * torch.randn(40, 6, generator=torch.Generator().manual_seed(2)), unchanged


@pytest.mark.parametrize("ridge", [0.01, 1.0, 30.0])
def test_the_restoration_is_a_least_squares_fit_with_one_more_row_for_each_entry(embeddings, ridge):
    changed, unchanged = (each.double() for each in embeddings)
    root = (ridge * ((changed - changed.mean(0)) ** 2).sum() / 6) ** 0.5
    rows = torch.cat([changed, root * torch.eye(6)])
    wanted = torch.cat([unchanged, root * torch.eye(6)])
    expected = torch.linalg.lstsq(rows, wanted).solution.mT
    torch.testing.assert_close(restoration(changed, unchanged, ridge), expected)


def test_a_projection_comes_after_the_restoration():
    projection, fitted = torch.randn(2, 3), torch.randn(3, 3)
    e = torch.randn(3)
    torch.testing.assert_close(restore_projection(projection, fitted) @ e, projection @ (fitted @ e))
    assert restore_projection(None, fitted) is fitted and restore_projection(projection, None) is projection


@pytest.mark.slow
def test_a_sweep_restores_every_point_but_the_unchanged_one_and_exports_the_best(target, grid, three_files, tmp_path):
    settings = {"lambda_2": [0.0, 0.5, 2.0]}
    plain, module = (vector_module(target, grid, three_files, restore=count, **settings) for count in (0, 4))
    for each in (plain, module):
        validate(each)
    assert list(module.restorations) == module.points[1:] and not plain.restorations
    assert module.sweep[0] == plain.sweep[0] and module.sweep[1] != plain.sweep[1]
    assert all(
        one["divergence"] < other["divergence"] for one, other in zip(module.sweep[1:], plain.sweep[1:], strict=True)
    )

    module.best = module.points[2]
    transferred = exported_target(target, module.export(tmp_path / "vector"))
    assert read_weights(tmp_path / "vector/model.safetensors")[0]["restore"] == 4
    images = Marked(4, seed=8)[torch.arange(4)]["image"]  # the training images
    unchanged = exported_target(target, three_files["onto"])
    with torch.no_grad():
        before, after = (each.embed(each.normalise(images)) for each in (unchanged, transferred))
        expected = unchanged.head(after @ restoration(after, before).mT)
        torch.testing.assert_close(transferred(images), expected, rtol=1e-4, atol=1e-4)
