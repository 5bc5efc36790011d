"""Attributions by a white-box method as a teacher of vectors c_z."""

import pytest
import references_anyhead as slow
import torch
from toys import batch_of

from explainers import posthoc
from explainers.anyhead import PropagationTeacher
from explainers.anyhead.functionals import random_functionals
from explainers.anyhead.propagation_teacher import attribution_loss
from explainers.runtime.sampling import stream

METHODS = ["DecompX-PLUS", "AttnLRP-SkipPLUS", "LibraFullGrad-PLUS", "XGradCAM"]
TARGETS = ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]
ALL = ["predicted", "other", "difference", "mixture", "isotropic"]


def exact_vectors(method, images, width):
    """c_z, (B, N, D): its entry d is the attribution of the functional that reads channel d."""
    units = torch.eye(width).expand(len(images), -1, -1)
    return method.explain(images, units).flatten(2).mT


@pytest.mark.parametrize(("method", "name"), [*((method, TARGETS[0]) for method in METHODS), (METHODS[0], TARGETS[1])])
def test_vectors_whose_products_are_the_attributions_have_no_loss(make_target, grid, images, method, name):
    target = make_target(name)
    teacher = PropagationTeacher(target, grid, method, ALL)
    rows = teacher(batch_of(images), epoch=3)
    assert rows["functional"].shape == (5, 5, target.embed_dim)
    vectors = exact_vectors(posthoc.build(method, target, grid), images, target.embed_dim)
    expected = rows["attribution"]
    torch.testing.assert_close(rows["functional"] @ vectors.mT, expected, rtol=1e-4, atol=1e-5 * expected.abs().max())
    assert teacher.compute(vectors, rows) < 1e-6
    assert teacher.compute(vectors + 0.3 * vectors.std() * torch.randn_like(vectors), rows) > 0.02
    constant = teacher.compute(vectors.mean(1, keepdim=True).expand_as(vectors), rows)
    assert constant == pytest.approx(1, abs=1e-4)  # the best constant
    assert teacher.compute(torch.randn(5, 1, target.embed_dim).expand_as(vectors), rows) > 1


def test_the_loss_is_that_of_loops():
    vectors, functionals, attributions = torch.randn(3, 16, 6), torch.randn(3, 2, 6), 5 * torch.randn(3, 2, 16)
    expected = slow.squared_loss(vectors, functionals, attributions)
    assert attribution_loss(vectors, functionals, attributions).item() == pytest.approx(expected, rel=1e-5)


def test_functionals_are_those_that_the_index_of_the_image_and_the_epoch_decide(target, grid, images):
    rows, seed = (
        PropagationTeacher(target, grid, functionals=ALL)(batch_of(images, first=70), epoch=2),
        stream("functionals", 0, 2),
    )
    expected = random_functionals(ALL, target.head.weight, target(images), 70 + torch.arange(5), seed)
    torch.testing.assert_close(rows["functional"], expected, rtol=1e-4, atol=1e-5)
