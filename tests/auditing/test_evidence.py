"""The evidence of one batch: patches, totals and vectors against loops, for every kind of head and explainer."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from refusals import check_refused
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from explainers import posthoc
from explainers.anyhead import AnyHead, AnyHeadNetwork
from explainers.auditing.evidence import decompose_lazily, functionals, take_evidence
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.heads import ProjectedHead

LABELS = torch.tensor([0, 1, -1, 3, 4])


def slow_functional(target, embedding, label):
    """v_y, as the gradient of the logit minus the mean of the others; of a cosine for a constant length."""
    length = embedding.norm()

    def score(point):
        head = target.head
        cosine = isinstance(head, ProjectedHead)
        logits = head.scale * head.weight @ point / length if cosine else head(point)
        others = [logit for k, logit in enumerate(logits) if k != label]
        return logits[label] if target.score == "sigmoid" else logits[label] - sum(others) / len(others)

    return torch.func.grad(score)(embedding)


def heads():
    torch.manual_seed(3)
    yield "linear", nn.Linear(24, 5), "softmax"
    yield "cosine", ProjectedHead(torch.nn.functional.normalize(torch.randn(5, 24), dim=-1), scale=20.0), "softmax"
    yield "network", nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 5)), "softmax"
    yield "sigmoid", nn.Linear(24, 5), "sigmoid"


def anyhead(target, grid, **paths):
    """With weights of every kind: after a training, none is 0 or 1."""
    explainer = AnyHead(target, grid, partial(AnyHeadNetwork, blocks=[0, 1], width=12, **paths), blend=0.3).eval()
    generator = torch.Generator().manual_seed(2)
    for weight in explainer.network.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    explainer.network.scale.fill_(3.0)
    explainer.network.spread.fill_(2.0)
    return explainer


COARSE = PatchGrid(32, 16, differs=True)
LAST = {"direct": [1, 2, 3]}
EXPLAINERS = {
    "AnyHead": anyhead,
    "AnyHead, flow": partial(anyhead, **LAST, paths="flow"),
    "AnyHead, coarse": lambda target, grid: anyhead(target, COARSE, **LAST),
    "PathFlow": partial(posthoc.PathFlow, start=1),
    "DirectPaths": partial(posthoc.DirectPaths, start=1),
}


@pytest.mark.parametrize(
    ("name", "pooling"), [*((name, "token") for name in EXPLAINERS), ("AnyHead, flow", "avg"), ("PathFlow", "avg")]
)
@torch.no_grad()
def test_what_is_computed_lazily_is_what_all_vectors_give(make_target, grid, images, name, pooling):
    explainer = EXPLAINERS[name](make_target(depth=4, init_values=0.7, global_pool=pooling), grid)
    vectors, embeddings = explainer.decompose(images)
    found, products, vectors_of = decompose_lazily(explainer, images)
    torch.testing.assert_close(found, embeddings)
    functionals = torch.randn(5, 2, 24)
    torch.testing.assert_close(products(functionals), functionals @ vectors.mT, rtol=1e-3, atol=1e-4)
    patches = torch.rand(5, vectors.shape[1]).argsort(1)[:, :3]
    expected = torch.stack([each[chosen] for each, chosen in zip(vectors, patches, strict=True)])
    assert expected.std() > 0.01
    torch.testing.assert_close(vectors_of(patches), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("head", "score"), [each[1:] for each in heads()], ids=[each[0] for each in heads()])
def test_the_strongest_patches_are_those_with_most_evidence_for_what_is_predicted_or_is_the_label(
    target, grid, images, head, score
):
    target = TargetModel(target, head=head, score=score).eval()
    explainer = posthoc.PathFlow(target, grid)
    found = take_evidence(explainer, images, LABELS, strongest=6)
    vectors, embeddings = explainer.decompose(images)
    logits = target(images)
    assert torch.equal(found.predicted, logits.argmax(1)) and torch.equal(found.labels, LABELS)
    assert (found.predicted != LABELS).any()
    for i in range(5):
        predicted, label = found.predicted[i].item(), LABELS[i].item()
        v = slow_functional(target, embeddings[i], predicted)
        v_label = v if label < 0 else slow_functional(target, embeddings[i], label)
        torch.testing.assert_close(functionals(target, embeddings, found.predicted)[i], v, rtol=1e-3, atol=1e-5)
        evidence = [(v @ c).item() for c in vectors[i]]
        ranked = [max(one, (v_label @ c).item()) for one, c in zip(evidence, vectors[i], strict=True)]
        order = sorted(range(16), key=lambda z: -ranked[z])[:6]
        assert found.patches[i].tolist() == order
        assert found.totals[i].item() == pytest.approx(sum(max(0, one) for one in evidence), rel=1e-3)
        torch.testing.assert_close(found.vectors[i].float(), vectors[i, order], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.embeddings[i].float(), embeddings[i], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["AnyHead, flow", "PathFlow"])
@torch.no_grad()
def test_few_patches_take_little_more_work_than_a_pass(make_target, images, name):
    target = make_target(depth=4)
    explainer = EXPLAINERS[name](target, PatchGrid(32, 8, differs=True))  # as `load` builds it
    work = []
    for call in (target, partial(take_evidence, explainer, labels=LABELS, strongest=2), explainer.decompose):
        with FlopCounterMode(display=False) as counter:
            call(images)
        work.append(counter.get_total_flops())
    assert work[0] < work[1] < 1.5 * work[0] < work[2]


def test_evidence_is_compact_and_leaves_the_images_as_they_were(target, grid, images):
    before = images.clone()
    found = take_evidence(anyhead(target, grid), images, LABELS, strongest=3)
    assert found.vectors.shape == (5, 3, 24) and found.vectors.dtype == found.embeddings.dtype == torch.float16
    assert found.patches.dtype == torch.int16 and found.totals.dtype == torch.float32
    assert torch.equal(images, before) and found.numbers.tolist() == [0, 1, 2, 3, 4]


def take(target, images, grid, head=None, score="softmax", factor=1):
    """The evidence of a target with another head, of vectors that are `factor` as large."""
    target = TargetModel(target, head=head or target.head, score=score).eval()
    vectors, embeddings = posthoc.DirectPaths(target, grid).decompose(images)
    explainer = SimpleNamespace(target=target, grid=grid, decompose=lambda images: (vectors * factor, embeddings))
    return take_evidence(explainer, images, LABELS)


REFUSED = [
    ("score=value", lambda target, images, grid: take(target, images, grid, nn.Linear(24, 1), "value")),
    ("class", lambda target, images, grid: take(target, images, grid, ProjectedHead(torch.randn(1, 24)))),
    ("65504", lambda target, images, grid: take(target, images, grid, factor=1e6)),  # more than half precision holds
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_cannot_be_audited_is_refused(told, call, request):
    check_refused(request, told, call)
