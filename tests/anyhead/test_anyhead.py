"""The module of vectors c_z: what it explains, and its training; `test_anyhead_weights` has its files."""

import math
from functools import partial

import pytest
import references_anyhead as slow
import torch
from torch import nn
from toys import VECTORS, batch_of, fit, step, training

from explainers.anyhead import AnyHead, AnyHeadNetwork, CoalitionTeacher, PropagationTeacher, anyhead
from explainers.learned.sources import complete
from explainers.transformer.path_flow import sum_paths
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # steps are taken without a trainer, too

TEACHERS = {"propagation": PropagationTeacher, "coalitions": partial(CoalitionTeacher, pairs=3)}
TEMPERATURES = [None, 2.0, math.inf]


@pytest.fixture(params=TEACHERS)
def teacher(request):
    return TEACHERS[request.param]


class Known(nn.Module):
    """Says the vectors that it was told."""

    blocks = direct = ()
    paths = "direct"

    def __init__(self, target, grid, vectors):
        super().__init__()
        self.vectors = vectors
        self.register_buffer("scale", torch.ones(()))

    def forward(self, embeddings, maps, paths=None, functionals=None, blend=0.0):
        vectors = self.vectors[: len(embeddings)]
        return vectors if functionals is None else vectors @ functionals.mT


def known(target, grid, **settings):
    vectors = torch.randn(5, 16, target.embed_dim)
    return vectors, AnyHead(target, grid, partial(Known, vectors=vectors), **settings).eval()


def slow_heatmap(head, embedding, vectors, label, temperature):
    """Of a linear layer, by loops."""
    functional = slow.score_derivative(head.weight.tolist(), head(embedding).tolist(), label, temperature)
    return slow.heatmap(functional, vectors, 4)


HEADS = {
    "linear": lambda: nn.Linear(24, 5),
    "network": lambda: nn.Sequential(nn.Linear(24, 7), nn.Tanh(), nn.Linear(7, 5)),
    "cosine": lambda: FixedHead(simplex(5, 8), torch.randn(8, 24), scale=9.0),
}


def linear_at(head, embedding):
    """The linear head with the same logits and the same derivative at an embedding; of a cosine at constant length."""
    if isinstance(head, FixedHead):
        matrices = [part.tolist() for part in (head.weight, head.projection)]
        rows = torch.tensor(slow.cosine_rows(*matrices, embedding.tolist(), scale=9.0))
    else:
        rows = torch.autograd.functional.jacobian(head, embedding)
    tangent = nn.Linear(24, 5)
    tangent.load_state_dict({"weight": rows, "bias": head(embedding).detach() - rows @ embedding})
    return tangent


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [*(("linear", each) for each in TEMPERATURES), ("network", 2.0), ("network", math.inf), ("cosine", 2.0)],
)
def test_a_heatmap_is_the_product_of_vectors_and_the_derivative_of_the_score(target, grid, images, kind, temperature):
    target.head = HEADS[kind]()
    vectors, explainer = known(target, grid, temperature=temperature)
    embeddings, predicted = target.embed(target.normalise(images)).detach(), target(images).argmax(1)
    every, classes = explainer.all_classes(images), torch.tensor([3, 0, 4, 1, 1])
    assert every.shape == (5, 5, 4, 4) and not torch.equal(predicted, classes)
    for i, embedding in enumerate(embeddings):
        tangent = linear_at(target.head, embedding)
        for label in range(5):
            expected = slow_heatmap(tangent, embedding, vectors[i], label, temperature)
            torch.testing.assert_close(every[i, label], expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(explainer(images, classes), every[torch.arange(5), classes], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(explainer(images), every[torch.arange(5), predicted], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(explainer.prepare(images)(classes), explainer(images, classes))
    with torch.inference_mode():
        tasks = explainer.explain_tasks(images, [nn.Linear(24, 7), target.head])
        torch.testing.assert_close(tasks[:, 1], explainer(images))


@torch.no_grad()
def test_many_tasks_are_explained_by_the_class_that_each_predicts(target, grid, images):
    temperature = 2.0
    vectors, explainer = known(target, grid, temperature=temperature)
    heads, embeddings = [nn.Linear(24, k) for k in (2, 5, 7)], target.embed(target.normalise(images))
    for head in heads:
        nn.init.normal_(head.weight)
    heatmaps = explainer.explain_tasks(images, heads)
    assert heatmaps.shape == (5, 3, 4, 4)
    predicted = [head(embeddings).argmax(1).tolist() for head in heads]
    assert max(len(set(classes)) for classes in predicted) > 1  # or the first image's would do for all
    for task, head in enumerate(heads):
        for i in range(5):
            expected = slow_heatmap(head, embeddings[i], vectors[i], predicted[task][i], temperature)
            torch.testing.assert_close(heatmaps[i, task], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_perfect_student_has_no_loss_in_training_and_the_heatmaps_of_its_teacher(target, grid, images):
    method = PropagationTeacher(target, grid).teacher
    vectors = method.explain(images, torch.eye(24).expand(5, -1, -1)).flatten(2).mT
    explainer = AnyHead(target, grid, partial(Known, vectors=vectors))
    assert step(training(explainer, PropagationTeacher), batch_of(images)) < 1e-6
    classes = torch.tensor([3, 0, 4, 1, 1])
    expected = method(images, classes)
    torch.testing.assert_close(explainer(images, classes), expected, rtol=1e-4, atol=1e-5 * expected.abs().max())


def test_training_and_explaining_in_bfloat16_is_nearly_the_same(target, grid, images, teacher):
    torch.manual_seed(0)
    explainer = AnyHead(target, grid, VECTORS, temperature=1.0)
    module = training(explainer, teacher)
    rows = complete(batch_of(images), module.sources)
    exact = module.loss.compute(explainer.predict(rows), rows)
    with torch.autocast("cpu", torch.bfloat16):
        low = complete(batch_of(images), module.sources)
        loss = module.loss.compute(explainer.predict(low), low)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)
    fit(module, images, epochs=1, precision="bf16-mixed", validate=True)
    explainer.eval()
    heatmaps = explainer(images)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = explainer(images)
    assert rounded.dtype == torch.float32
    assert torch.corrcoef(torch.stack([heatmaps.flatten(), rounded.flatten()]))[0, 1] > 0.98


FLOW = {"network": partial(AnyHeadNetwork, blocks=[1], width=12, direct=[0, 1], paths="flow"), "blend": 0.3}


@pytest.mark.parametrize(
    ("arguments", "size", "precision"),
    [
        ({}, 64, torch.float32),
        ({"reg_tokens": 2}, 32, torch.bfloat16),
        ({"global_pool": "avg"}, 32, torch.float32),
    ],
    ids=str,
)
@torch.no_grad()
def test_all_classes_at_once_are_what_each_is_alone(make_target, monkeypatch, arguments, size, precision):
    target = make_target(img_size=size, num_classes=30, **arguments)
    explainer = AnyHead(target, target.grid, **FLOW, temperature=1.0).eval()
    nn.init.normal_(explainer.network.path_weight.weight)
    images, sums = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8), []
    monkeypatch.setattr(anyhead, "sum_paths", lambda *args: sums.append(sum_paths(*args)) or sums[-1])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        found = explainer.all_classes(images)
        assert len(sums) == (size == 32 and "global_pool" not in arguments)  # 16 patches, or 64, and 24 channels
        for label in (0, 7, 29):
            alone = explainer(images, torch.tensor([label, label]))
            error = (found[:, label] - alone).abs().max() / alone.abs().max()
            assert error < (1e-4 if precision == torch.float32 else 0.05)
        assert len(sums) < 2
