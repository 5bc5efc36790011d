"""Linear functionals of the embedding: of the classes of heads, and random ones."""

import math

import pytest
import references_anyhead as slow
import torch
from torch import nn
from torch.nn import functional as F

from explainers.anyhead.functionals import random_functionals
from explainers.errors import InputError
from explainers.models.functionals import class_rows, head_functionals, score_functionals
from explainers.models.heads import DistilledHead, ProjectedHead
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex

KINDS = ["predicted", "other", "difference", "mixture", "isotropic"]


def draw(kinds, rows, index, seed=0):
    """Functionals of images that have the same logits: class 2 is the most likely, then 0, then 1 and so on."""
    logits = -torch.arange(len(rows)).float().index_fill(0, torch.tensor([2]), -1)
    return random_functionals(kinds, rows, logits.expand(len(index), -1), index, seed)


def distilled():
    head = DistilledHead(nn.Linear(12, 5), nn.Linear(12, 5))
    return head, torch.cat([head.head.weight, head.head_dist.weight], 1) / 2


def layers():
    head = nn.Sequential(nn.Linear(24, 7), nn.Identity(), nn.Linear(7, 5, bias=False))
    return head, head[2].weight @ head[0].weight


def linear():
    head = nn.Linear(24, 5)
    return head, head.weight


def fixed():
    weight = torch.randn(5, 24)
    return FixedHead(weight, normalise=False, scale=3.0), 3 * weight


@pytest.mark.parametrize("build", [linear, distilled, layers, fixed])
def test_the_rows_of_a_linear_head_are_those_of_its_matrix(build):
    head, expected = build()
    found = class_rows(head, 24, torch.zeros(1))
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(class_rows(head, 24, torch.zeros(1)), found)


NONLINEAR = {
    "activation": nn.Sequential(nn.ReLU(), nn.Linear(24, 5)),
    "normalisation": nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 5)),
    "fixed": FixedHead(simplex(5, 24)),
    "cube": lambda embeddings: embeddings[..., :5] ** 3,
}


@pytest.mark.parametrize("kind", NONLINEAR)
def test_a_head_that_is_not_linear_is_refused(kind):
    with pytest.raises(InputError, match="linear head"):
        class_rows(NONLINEAR[kind], 24, torch.zeros(1))


@pytest.mark.parametrize("projected", [False, True])
def test_a_head_that_divides_by_the_length_has_directions(projected):
    """They are its rows at embeddings of length 1, and all that a loss without lengths needs."""
    weight, projection = torch.randn(5, 8 if projected else 24), torch.randn(8, 24) if projected else None
    head = FixedHead(weight, projection, scale=3.0)
    embedding = torch.randn(24)
    length = (embedding if projection is None else projection @ embedding).norm()
    found = class_rows(head, 24, embedding, directions=True)
    torch.testing.assert_close(3 / length * found @ embedding, head(embedding), rtol=1e-4, atol=1e-5)
    linear = FixedHead(weight, projection, normalise=False, scale=3.0)
    torch.testing.assert_close(class_rows(linear, 24, embedding, directions=True), 3 * found, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="linear head"):
        class_rows(NONLINEAR["activation"], 24, embedding, directions=True)


@pytest.mark.parametrize("temperature", [None, 0.5, 1.0, math.inf])
def test_a_score_has_the_derivative_that_loops_and_autograd_find(temperature):
    head, embeddings = nn.Linear(24, 5), (3 * torch.randn(4, 24)).requires_grad_()
    logits = head(embeddings)
    every = score_functionals(head.weight, logits, temperature)
    assert every.shape == (4, 5, 24)
    for label in range(5):
        classes = torch.full((4,), label)
        found = score_functionals(head.weight, logits, temperature, classes)
        torch.testing.assert_close(found, every[:, label], rtol=1e-4, atol=1e-4)
        score, others = logits[:, label], logits[:, [k for k in range(5) if k != label]]
        if temperature == math.inf:
            score = score - others.mean(-1)
        elif temperature is not None:
            score = score - temperature * (others / temperature).logsumexp(-1)
        (gradient,) = torch.autograd.grad(score.sum(), embeddings, retain_graph=True)
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)
        for i in range(4):
            expected = slow.score_derivative(head.weight.tolist(), logits[i].tolist(), label, temperature)
            torch.testing.assert_close(found[i], torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("temperature", [None, 2.0, math.inf])
def test_a_class_of_a_cosine_head_has_the_derivative_for_a_constant_length(projected, temperature):
    weight, projection = torch.randn(5, 8), torch.randn(8, 24) if projected else None
    head, embeddings = ProjectedHead(weight, projection, scale=7.0), 3 * torch.randn(4, 24 if projected else 8)
    every, logits = head_functionals(head, embeddings, temperature), head(embeddings)
    matrix = torch.eye(8) if projection is None else projection
    for i, embedding in enumerate(embeddings):
        rows = slow.cosine_rows(weight.tolist(), matrix.tolist(), embedding.tolist(), scale=7.0)
        torch.testing.assert_close(torch.tensor(rows) @ embedding, logits[i], rtol=1e-4, atol=1e-5)
        for label in range(5):
            expected = slow.score_derivative(rows, logits[i].tolist(), label, temperature)
            torch.testing.assert_close(every[i, label], torch.tensor(expected), rtol=1e-4, atol=1e-4)
    classes = torch.tensor([3, 0, 4, 1])
    found = head_functionals(head, embeddings, temperature, classes)
    torch.testing.assert_close(found, every[torch.arange(4), classes], rtol=1e-4, atol=1e-4)
    linear = ProjectedHead(weight, projection, normalise=False, scale=7.0)
    rows = class_rows(linear, embeddings.shape[1], embeddings)
    expected = score_functionals(rows, linear(embeddings), temperature, classes)
    torch.testing.assert_close(head_functionals(linear, embeddings, temperature, classes), expected)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_of_a_certain_model_the_direction_stays_exact(precision):
    """1 − p is 1e-13 here; a difference from the mean of all rows would be rounding errors alone."""
    rows, logits = torch.randn(3, 24), torch.tensor([[60.0, 0.0, -1.0]])
    expected = rows[0] - (math.e**0.5 * rows[1] + rows[2]) / (1 + math.e**0.5)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        for found in (
            score_functionals(rows, logits, 2.0, torch.tensor([0]))[0],
            score_functionals(rows, logits, 2.0)[0, 0],
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_functionals_depend_on_the_index_of_the_image_and_the_epoch_alone():
    rows, logits = torch.randn(7, 24), torch.randn(4, 7)
    index = torch.tensor([3, 1_281_166, 0, 2**35])
    together = random_functionals(KINDS, rows, logits, index, seed=9)
    assert together.shape == (4, 5, 24) and together.dtype == torch.float32
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(4, 5))
    for i in range(4):
        alone = random_functionals(KINDS, rows, logits[i : i + 1], index[i : i + 1], seed=9)[0]
        torch.testing.assert_close(together[i], alone)
    later = random_functionals(KINDS, rows, logits, index, seed=10)
    torch.testing.assert_close(later[:, 0], together[:, 0])  # the predicted class stays the predicted class
    assert not torch.isclose(later[:, 2:], together[:, 2:]).all(-1).all()
    assert (F.cosine_similarity(later[:, 3:], together[:, 3:], dim=-1).abs() < 0.999).all()
    others = draw(["mixture", "isotropic", "isotropic"], rows, torch.arange(300))
    for first, second in ((others[1:], others[:-1]), (others[:, 1], others[:, 2])):  # of images, and of places
        assert F.cosine_similarity(first, second, dim=-1).mean().abs() < 0.05


def nearest(functionals, candidates):
    """The row of `candidates` (C, D) that each of (B, D) is, up to its length."""
    similar = functionals @ F.normalize(candidates, dim=-1).mT
    best, which = similar.max(-1)
    torch.testing.assert_close(best, torch.ones_like(best))
    return which


@pytest.mark.parametrize("classes", [5, 30])
def test_predicted_and_other_are_the_most_likely_class_and_one_of_the_next(classes):
    rows = torch.randn(classes, 48)
    found = draw(["predicted", "other"], rows, torch.arange(4000))
    assert (nearest(found[:, 0], rows - rows.mean(0)) == 2).all()
    counts = nearest(found[:, 1], rows - rows.mean(0)).bincount(minlength=classes)
    likely = min(20, classes - 1)
    order = [0, 1, *range(3, classes)][:likely]
    assert counts[order].sum() == 4000
    assert (counts[order] - 4000 / likely).abs().max() < 5 * (4000 / likely) ** 0.5


def test_differences_are_of_two_classes_and_all_pairs_are_drawn_equally_often():
    rows = torch.randn(5, 24)
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    found = draw(["difference"], rows, torch.arange(4000))[:, 0]
    assert (found.norm(dim=-1) > 0.99).all()
    counts = nearest(found, torch.stack([rows[i] - rows[j] for i, j in pairs])).bincount(minlength=20)
    assert (counts - 200).abs().max() < 5 * 200**0.5


@pytest.mark.parametrize("kind", ["mixture", "isotropic"])
def test_mixtures_vary_like_the_rows_and_isotropic_ones_in_all_directions(kind):
    """Of unit length both: so do the directions of normal ones."""
    rows = torch.randn(5, 8) * torch.tensor([3.0, 1, 1, 1, 1, 1, 0.3, 0.1]) + 5
    found = draw([kind], rows, torch.arange(30_000))[:, 0]
    wanted = torch.randn(30_000, 8)
    if kind == "mixture":
        centred = rows - rows.mean(0)
        values, axes = torch.linalg.eigh(centred.mT @ centred)
        wanted = wanted * values.clamp(min=0).sqrt() @ axes.mT
    wanted = F.normalize(wanted, dim=-1)
    assert found.mean(0).abs().max() < 0.03
    torch.testing.assert_close(found.mT @ found / 30_000, wanted.mT @ wanted / 30_000, rtol=0, atol=0.02)
