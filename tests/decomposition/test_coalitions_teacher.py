"""Embeddings of masked images as a teacher of vectors c_z; with the Shapley kernel, these are Shapley values."""

from functools import partial

import pytest
import references
import references_decomposition as slow
import torch
from torch import nn
from toys import batch_of, game

from explainers.decomposition import Coalitions
from explainers.decomposition.coalitions import coalition_errors, coalition_loss
from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.sampling import shapley_coalitions, shapley_weights
from explainers.shapley.module import efficient

GRID = PatchGrid(image_size=24, patch_size=8)
CLASSES = torch.tensor([0, 2, 1, 1, 0])
FITS = ["uniform", "shapley"]


@pytest.fixture
def target(make_target):
    """It sees 24 × 24 pixels in 3 × 3 patches, and so has 512 coalitions."""
    return make_target(img_size=24)


@pytest.fixture
def images(images):
    return images[:, :, :24, :24].contiguous()


@pytest.fixture
def additive(target):
    """A model whose embedding is a constant and a sum over patches, in which hidden ones are 0: (model, vectors of)."""
    patches = nn.Conv2d(3, 24, 8, stride=8, bias=False).requires_grad_(False)
    target.embed = lambda normalised: 3 + patches(normalised).sum((2, 3))
    return target, lambda images: patches(target.normalise(images)).flatten(2).mT


@pytest.mark.parametrize("fit", FITS)
def test_vectors_whose_sums_are_the_embeddings_have_no_loss(additive, images, fit):
    target, vectors_of = additive
    teacher = Coalitions(target, GRID, count=12, fit=fit)
    rows = batch_of(images) | teacher(batch_of(images), epoch=3)
    vectors = vectors_of(images)
    assert teacher.loss(vectors, rows) < 1e-9
    assert teacher.loss(vectors + 0.3 * vectors.std() * torch.randn_like(vectors), rows) > 0.01
    nothing = teacher.loss(torch.zeros_like(vectors), rows)
    if fit == "uniform":
        assert nothing == pytest.approx(1, abs=1e-5)
    else:  # every patch then gets the same share of what is missing
        assert 0.01 < nothing < 1


@pytest.mark.parametrize("fit", FITS)
def test_the_loss_is_that_of_loops(target, images, fit):
    teacher = Coalitions(target, GRID, count=6, fit=fit)
    rows, vectors, head = teacher(batch_of(images)), 0.3 * torch.randn(5, 9, 24), torch.randn(3, 24)
    found = coalition_loss(*coalition_errors(vectors, rows, fit), head, CLASSES)
    assert found.item() == pytest.approx(slow.unexplained(vectors, rows, head, CLASSES, fit), rel=1e-4)
    head = target.head.weight.detach() - target.head.weight.detach().mean(0)
    own = coalition_loss(*coalition_errors(vectors, rows, fit), head, target(images).argmax(-1))
    torch.testing.assert_close(teacher.loss(vectors, rows), own)


def test_an_image_that_no_mask_changes_does_not_count():
    errors, seen, head = torch.randn(3, 4, 6), torch.randn(3, 4, 6), torch.randn(5, 6)
    expected = coalition_loss(errors[:2], seen[:2], head, CLASSES[:2])
    errors[2] = seen[2] = 0
    torch.testing.assert_close(coalition_loss(errors, seen, head, CLASSES[:3]), expected)
    assert coalition_loss(0 * errors, 0 * seen, head, CLASSES[:3]) == 0


@torch.no_grad()
@pytest.mark.parametrize("removal", ["zero", "black"])
def test_rows_are_embeddings_of_the_visible_patches(target, images, removal):
    rows = Coalitions(target, GRID, count=3, removal=removal, chunk_size=7)(batch_of(images, first=70), epoch=2)
    shapes = {"keep": (5, 3, 9), "seen": (5, 3, 24), "weight": (5, 3), "blank": (5, 24), "whole": (5, 24)}
    assert {name: tuple(row.shape) for name, row in rows.items()} == shapes
    fill = -target.mean / target.std if removal == "black" else 0
    for i, image in enumerate(target.normalise(images)):
        seen = [set(row.nonzero()[:, 0].tolist()) for row in rows["keep"][i]] + [set(), set(range(9))]
        expected = torch.cat([target.embed(references.only(image, patches, 3, fill)[None]) for patches in seen])
        found = torch.cat([rows["seen"][i], rows["blank"][i : i + 1], rows["whole"][i : i + 1]])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fit", FITS)
def test_the_coalitions_of_an_image_are_its_own_and_drawn_anew_every_epoch(target, images, fit):
    build = partial(Coalitions, target, GRID, count=4, fit=fit)
    together, later = (build()(batch_of(images, first=70), epoch) for epoch in (2, 3))
    alone = build()(batch_of(images[3:4], first=73), epoch=2)
    for name, row in together.items():
        assert not row.requires_grad
        torch.testing.assert_close(alone[name][0], row[3], rtol=1e-4, atol=1e-5)
    assert not torch.equal(together["keep"], later["keep"])
    assert not torch.equal(together["keep"], build(seed=1)(batch_of(images, first=70), 2)["keep"])


def rows_of(values, coalitions, weight):
    """Rows of one image with these coalitions, in double precision."""
    return {
        "keep": torch.tensor([[[patch in coalition for patch in range(9)] for coalition in coalitions]]),
        "seen": torch.stack([values[coalition] for coalition in coalitions])[None].double(),
        "weight": weight[None].double(),
        "blank": values[frozenset()][None].double(),
        "whole": values[frozenset(range(9))][None].double(),
    }


def minimiser(rows, fit):
    """The vectors (N, D) of the least squared error, which is linear in them and alike in every channel."""
    vectors = torch.zeros(1, 9, 24, dtype=torch.double)
    start = coalition_errors(vectors, rows, fit)[0][0]
    slopes = []
    for patch in range(9):
        moved = coalition_errors(vectors.index_fill(1, torch.tensor([patch]), 1), rows, fit)[0][0]
        slopes.append((moved - start)[:, 0])
    found = torch.linalg.lstsq(torch.stack(slopes, 1), -start, driver="gelsd").solution
    return efficient(found[None], rows["blank"], rows["whole"])[0] if fit == "shapley" else found


def test_of_all_coalitions_the_best_vectors_are_the_shapley_values_of_the_embedding(target, images):
    """Each coalition once, of all sizes from 1 to 8, with the probability that the Shapley kernel gives it."""
    values, exact = game(target, images[0], target.embed)
    coalitions = [coalition for coalition in values if 0 < len(coalition) < 9]
    kernel, often = references.shapley_sizes(9), [0, 9, 36, 84, 126, 126, 84, 36, 9, 0]
    weight = torch.tensor([kernel[len(each)] / often[len(each)] for each in coalitions])
    found = minimiser(rows_of(values, coalitions, weight), "shapley")
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(found, exact.double(), rtol=0, atol=1e-5)
    of_logits = game(target, images[0], lambda normalised: target.classify(target.embed(normalised)))[1]
    assert of_logits.abs().max() > 0.1
    torch.testing.assert_close(found @ target.head.weight.detach().double().mT, of_logits.double(), rtol=0, atol=1e-4)


def test_of_weighed_random_coalitions_the_best_vectors_are_near_the_shapley_values(target, images):
    values, exact = game(target, images[0], target.embed)
    errors = {}
    for power in (0.0, 0.5, 1.0):
        keep = shapley_coalitions(torch.tensor([0]), 9, 10_000, seed=0, power=power)[0]
        coalitions = [frozenset(row.nonzero()[:, 0].tolist()) for row in keep]
        for weighed in (True, False):
            weight = shapley_weights(keep, power) if weighed else torch.ones(10_000)
            error = (minimiser(rows_of(values, coalitions, weight), "shapley") - exact).abs().max()
            errors[power, weighed] = (error / (exact.max() - exact.min())).item()
    assert max(errors[power, True] for power in (0.0, 0.5, 1.0)) < 0.01
    assert errors[0.0, False] > 2 * errors[0.0, True]


def test_a_uniform_fit_is_a_regression_with_an_intercept(target, images):
    values, exact = game(target, images[0], target.embed)
    keep = shapley_coalitions(torch.tensor([0]), 9, 60, seed=0, power=0)[0]
    coalitions = [frozenset(row.nonzero()[:, 0].tolist()) for row in keep]
    rows = rows_of(values, coalitions, torch.rand(60))
    expected = slow.regression(coalitions, rows["seen"][0], 9)
    torch.testing.assert_close(minimiser(rows, "uniform"), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected, exact.double(), atol=0.01 * exact.abs().max())


@pytest.mark.parametrize("fit", FITS)
def test_coalitions_are_drawn_as_their_fit_needs_them(target, images, fit):
    """A weight of each coalition for which the mean of any function of its size is that of the Shapley kernel."""
    rows = Coalitions(target, GRID, count=4, fit=fit)(batch_of(images))
    sizes, power = rows["keep"].sum(-1), {"uniform": 0, "shapley": 0.5}[fit]
    kernel, drawn = references.shapley_sizes(9), slow.coalition_sizes(9, power)
    for size, weight in zip(sizes.flatten().tolist(), rows["weight"].flatten().tolist(), strict=True):
        assert weight == pytest.approx(kernel[size] / drawn[size], rel=1e-5)


def test_the_unit_is_the_spread_of_the_embeddings_shared_among_independent_patches(target):
    unit = Coalitions(target, GRID).unit({"seen": 100 + 6 * torch.randn(4, 1000, 24)})
    assert unit.item() == pytest.approx(2, rel=0.05)


def test_a_single_coalition_and_an_unknown_fit_are_refused(target):
    with pytest.raises(InputError, match="^expected count of at least 2, got count=1$"):
        Coalitions(target, GRID, count=1)
    with pytest.raises(InputError, match="^expected fit uniform or shapley, got exact$"):
        Coalitions(target, GRID, fit="exact")
