"""The projection that restores the embeddings where a vector is added."""

import copy
from functools import partial

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader
from toys import SILENT, Marked, marked_splits, three_models

from datamodules.images import Images
from explainers.errors import InputError
from explainers.saved.weights import read_weights
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.vectors import ExplainabilityVector, exported_target
from explainers.vectors.lambda_sweep import restoration, restored


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


def test_it_lowers_the_error_on_other_images_and_changes_nothing_without_need(embeddings):
    changed, unchanged = embeddings
    fitted = restoration(changed[:30], unchanged[:30], ridge=0.1)
    error = (changed[30:] @ fitted.mT - unchanged[30:]).square().sum()
    assert error < 0.3 * (changed[30:] - unchanged[30:]).square().sum()
    torch.testing.assert_close(restoration(unchanged, unchanged), torch.eye(6))


def test_a_projection_comes_after_the_restoration():
    projection, fitted = torch.randn(2, 3), torch.randn(3, 3)
    e = torch.randn(3)
    torch.testing.assert_close(restored(projection, fitted) @ e, projection @ (fitted @ e))
    assert restored(None, fitted) is fitted and restored(projection, None) is projection


def build(target, grid, files, **settings):
    labels = partial(ShapleyLabels, budget=20)
    settings = {"lambda_1": [1.0], "lambda_2": [0.0, 0.5, 2.0], "labels": labels, "k": 3} | files | settings
    return ExplainabilityVector(copy.deepcopy(target), grid, **settings)


@pytest.fixture
def files(target, grid, tmp_path):
    return three_models(target, grid, tmp_path)


@pytest.mark.slow
def test_a_sweep_restores_every_point_but_the_unchanged_one_and_exports_the_best(target, grid, files, tmp_path):
    plain, module = (build(target, grid, files, restore=count) for count in (0, 4))
    for each in (plain, module):
        Trainer(accelerator="cpu", **SILENT).validate(each, Images(**marked_splits()[1]), verbose=False)
    assert list(module.restorations) == module.points[1:] and not plain.restorations
    assert module.sweep[0] == plain.sweep[0] and module.sweep[1] != plain.sweep[1]
    assert all(
        one["divergence"] < other["divergence"] for one, other in zip(module.sweep[1:], plain.sweep[1:], strict=True)
    )

    module.best = module.points[2]
    transferred = exported_target(target, module.export(tmp_path / "vector"))
    assert read_weights(tmp_path / "vector/model.safetensors")[0]["restore"] == 4
    images = Marked(4, seed=8)[torch.arange(4)]["image"]  # the training images
    unchanged = exported_target(target, files["onto"])
    with torch.no_grad():
        before, after = (each.embed(each.normalise(images)) for each in (unchanged, transferred))
        expected = unchanged.head(after @ restoration(after, before).mT)
        torch.testing.assert_close(transferred(images), expected, rtol=1e-4, atol=1e-4)


def test_a_number_of_images_below_zero_is_refused(target, grid, files):
    with pytest.raises(InputError, match="^expected restore of at least 0, got restore=-1$"):
        build(target, grid, files, restore=-1)


def test_training_images_come_from_a_datamodule(target, grid, files):
    with pytest.raises(InputError, match="^expected a datamodule with training images for restore, got dataloaders"):
        Trainer(accelerator="cpu", **SILENT).validate(
            build(target, grid, files, restore=4), DataLoader(Marked(7, seed=1), 3), verbose=False
        )
