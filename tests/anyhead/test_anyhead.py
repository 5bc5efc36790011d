"""The module of vectors c_z: what it explains, and its training; `test_anyhead_weights` has its files."""

import math
from functools import partial

import pytest
import references_anyhead as slow
import torch
from torch import nn
from toys import VECTORS, batch_of, equal, fit, state, step, training

from explainers.anyhead import AnyHead, AnyHeadNetwork, CoalitionTeacher, PropagationTeacher, anyhead
from explainers.errors import InputError
from explainers.learned.sources import complete
from explainers.models.functionals import class_rows
from explainers.models.heads import DistilledHead
from explainers.transformer.path_flow import sum_paths
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # steps are taken without a trainer, too

TEACHERS = {"propagation": PropagationTeacher, "coalitions": partial(CoalitionTeacher, pairs=3)}
TEMPERATURES = [None, 1.0, 2.0, math.inf]


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


@torch.no_grad()
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_heatmap_is_the_product_of_vectors_and_the_derivative_of_the_score(target, grid, images, temperature):
    vectors, explainer = known(target, grid, temperature=temperature)
    embeddings = target.embed(target.normalise(images))
    every, classes, predicted = explainer.all_classes(images), torch.tensor([3, 0, 4, 1, 1]), target(images).argmax(1)
    assert every.shape == (5, 5, 4, 4)
    for i in range(5):
        for label in range(5):
            expected = slow_heatmap(target.head, embeddings[i], vectors[i], label, temperature)
            torch.testing.assert_close(every[i, label], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(explainer(images, classes), every[torch.arange(5), classes])
    assert not torch.equal(predicted, classes)
    torch.testing.assert_close(explainer(images), every[torch.arange(5), predicted])


@torch.no_grad()
def test_any_functional_is_explained_alone_and_with_others(target, grid, images):
    vectors, explainer = known(target, grid)
    functionals = torch.randn(5, 3, 24)
    together = explainer.explain(images, functionals)
    assert together.shape == (5, 3, 4, 4)
    for i in range(5):
        for j in range(3):
            expected = slow.heatmap(functionals[i, j].tolist(), vectors[i], 4)
            torch.testing.assert_close(together[i, j], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(explainer.explain(images, functionals[:, 1]), together[:, 1])
    with pytest.raises(InputError, match=r"\[5, 24\] or \[5, V, 24\]"):  # not two functionals of each image
        explainer.explain(images, torch.randn(10, 24))


@torch.no_grad()
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_many_tasks_are_explained_by_the_class_that_each_predicts(target, grid, images, temperature):
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
def test_heads_of_several_layers_are_explained_like_one(make_target, grid, images):
    target = make_target("deit_tiny_distilled_patch16_224")
    assert isinstance(target.head, DistilledHead)
    vectors, explainer = known(target, grid, temperature=1.0)
    together = nn.Linear(48, 5)
    together.weight.copy_(class_rows(target.head, 48, images))
    together.bias.copy_((target.head.head.bias + target.head.head_dist.bias) / 2)
    embeddings = target.embed(target.normalise(images))
    torch.testing.assert_close(together(embeddings), target(images))
    expected = slow_heatmap(together, embeddings[2], vectors[2], 3, 1.0)
    torch.testing.assert_close(explainer.all_classes(images)[2, 3], expected, rtol=1e-4, atol=1e-4)
    first, second = nn.Linear(48, 7), nn.Linear(7, 3)
    product = nn.Linear(48, 3)
    product.weight.copy_(second.weight @ first.weight)
    product.bias.copy_(second(first.bias))
    found = explainer.explain_tasks(images, [nn.Sequential(first, second), product])
    torch.testing.assert_close(found[:, 0], found[:, 1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_head_that_is_not_linear_is_explained_by_the_gradient_at_the_embedding(target, grid, images, temperature):
    vectors, explainer = known(target, grid, temperature=temperature)
    target.head = nonlinear = nn.Sequential(nn.Linear(24, 7), nn.Tanh(), nn.Linear(7, 5))
    every, classes = explainer.all_classes(images), torch.tensor([3, 0, 4, 1, 1])
    embeddings = target.embed(target.normalise(images)).detach()
    for i, embedding in enumerate(embeddings):
        tangent = nn.Linear(24, 5)  # the linear head with the same logits and derivative there
        rows = torch.autograd.functional.jacobian(nonlinear, embedding)
        tangent.load_state_dict({"weight": rows, "bias": nonlinear(embedding).detach() - rows @ embedding})
        for label in range(5):
            expected = slow_heatmap(tangent, embedding, vectors[i], label, temperature)
            torch.testing.assert_close(every[i, label], expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(explainer(images, classes), every[torch.arange(5), classes], rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(explainer.explain_tasks(images, [nonlinear])[:, 0], explainer(images))


@torch.no_grad()
def test_classes_of_a_cosine_head_are_explained_as_those_of_the_linear_head_at_the_image(target, grid, images):
    """A head with the rows of each image, which the length of its embedding scales, has the same logits."""
    cosine = FixedHead(simplex(5, 8), torch.randn(8, 24), scale=9.0)
    target.head = cosine
    vectors, explainer = known(target, grid, temperature=2.0)
    embeddings, predicted = target.embed(target.normalise(images)), target(images).argmax(1)
    every, classes = explainer.all_classes(images), torch.tensor([3, 0, 4, 1, 1])
    matrices = [part.tolist() for part in (cosine.weight, cosine.projection)]
    for i, embedding in enumerate(embeddings):
        linear = nn.Linear(24, 5, bias=False)
        linear.weight.copy_(torch.tensor(slow.cosine_rows(*matrices, embedding.tolist(), scale=9.0)))
        for label in range(5):
            expected = slow_heatmap(linear, embedding, vectors[i], label, 2.0)
            torch.testing.assert_close(every[i, label], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(explainer(images, classes), every[torch.arange(5), classes], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(explainer(images), every[torch.arange(5), predicted], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(explainer.prepare(images)(classes), explainer(images, classes))
    tasks = explainer.explain_tasks(images, [nn.Linear(24, 7), cosine])
    torch.testing.assert_close(tasks[:, 1], explainer(images))


def test_a_temperature_of_0_is_refused(target, grid):
    with pytest.raises(InputError, match="^expected temperature above 0, got temperature=0$"):
        known(target, grid, temperature=0)


@torch.no_grad()
def test_a_perfect_student_has_no_loss_in_training_and_the_heatmaps_of_its_teacher(target, grid, images):
    method = PropagationTeacher(target, grid).teacher
    vectors = method.explain(images, torch.eye(24).expand(5, -1, -1)).flatten(2).mT
    explainer = AnyHead(target, grid, partial(Known, vectors=vectors))
    assert step(training(explainer, PropagationTeacher), batch_of(images)) < 1e-6
    classes = torch.tensor([3, 0, 4, 1, 1])
    expected = method(images, classes)
    torch.testing.assert_close(explainer(images, classes), expected, rtol=1e-4, atol=1e-5 * expected.abs().max())


@torch.no_grad()
def test_many_tasks_take_one_pass_of_the_network_and_one_of_the_target(target, grid, images):
    explainer, passes = AnyHead(target, grid, VECTORS).eval(), []
    explainer.network.register_forward_hook(lambda *_: passes.append("network"))
    target.backbone.patch_embed.register_forward_hook(lambda *_: passes.append("target"))
    explainer.explain_tasks(images, [nn.Linear(24, k) for k in (2, 5, 7)])
    assert sorted(passes) == ["network", "target"]


@pytest.mark.slow
def test_training_lowers_the_loss_and_leaves_the_target_as_it_was(make_target, grid, images, teacher):
    target = make_target(drop_path_rate=0.5, proj_drop_rate=0.2)
    before = state(target)
    torch.manual_seed(0)  # of the network's weights
    explainer = AnyHead(target, grid, VECTORS)
    module = training(explainer, teacher)
    seen = complete(batch_of(images), module.sources, epoch=1000)  # other draws than those of the training
    explainer.network.scale.copy_(module.loss.unit(seen))
    start = module.loss.loss(explainer.predict(seen), seen).item()
    fit(module, images, epochs=8)
    assert module.loss.loss(explainer.predict(seen), seen) < 0.9 * start
    assert equal(state(target), before)
    assert all(weight.grad is None for weight in target.parameters())
    assert not any(module.training for module in target.modules())


def test_training_and_explaining_in_bfloat16_is_nearly_the_same(target, grid, images, teacher):
    torch.manual_seed(0)
    explainer = AnyHead(target, grid, VECTORS, temperature=1.0)
    module = training(explainer, teacher)
    rows = complete(batch_of(images), module.sources)
    exact = module.loss.loss(explainer.predict(rows), rows)
    with torch.autocast("cpu", torch.bfloat16):
        low = complete(batch_of(images), module.sources)
        loss = module.loss.loss(explainer.predict(low), low)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)
    fit(module, images, epochs=1, precision="bf16-mixed", validate=True)
    explainer.eval()
    heatmaps = explainer(images)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = explainer(images)
    assert rounded.dtype == torch.float32
    assert torch.corrcoef(torch.stack([heatmaps.flatten(), rounded.flatten()]))[0, 1] > 0.98


@pytest.mark.parametrize("paths", ["direct", "flow"])
def test_the_gradient_of_a_heatmap_by_its_functional_is_the_vector_of_the_patch(target, grid, images, paths):
    explainer = AnyHead(target, grid, partial(AnyHeadNetwork, blocks=[1], width=12, direct=[0, 1], paths=paths)).eval()
    functionals = torch.randn(5, target.embed_dim, requires_grad=True)
    found = torch.autograd.grad(explainer.explain(images, functionals)[:, 0, 0].sum(), functionals)[0]
    torch.testing.assert_close(found, explainer.decompose(images)[0][:, 0].detach())


FLOW = {"network": partial(AnyHeadNetwork, blocks=[1], width=12, direct=[0, 1], paths="flow"), "blend": 0.3}


@pytest.mark.parametrize(
    ("arguments", "size", "precision"),
    [
        ({}, 32, torch.float32),
        ({}, 64, torch.float32),
        ({"reg_tokens": 2}, 32, torch.bfloat16),
        ({"global_pool": "avg"}, 32, torch.float32),
        ({"global_pool": "avg"}, 64, torch.bfloat16),
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


def test_gradients_of_heatmaps_by_the_network_are_those_of_the_vectors(make_target, images):
    target = make_target(num_classes=30)
    explainer = AnyHead(target, target.grid, **FLOW).eval()
    weights = list(explainer.network.path_weight.parameters())
    found = torch.autograd.grad(explainer.all_classes(images)[:, 3, 1].sum(), weights)
    rows = explainer.reads({"image": images})
    vectors = explainer.predict(rows).unflatten(1, target.grid.shape)[:, 1]
    expected = torch.autograd.grad((vectors @ target.head.weight[3]).sum(), weights)
    assert expected[0].abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
