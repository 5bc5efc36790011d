"""Texts as functionals: explicit gradients of similarities, contrasts, many texts, and heads of the same rows."""

import math

import pytest
import torch
from refusals import check_refused
from torch.nn import functional as F

from explainers import posthoc
from explainers.models import TargetModel
from explainers.text import TextExplainer, TextHead, clip_text_head

WORDS = ["cat", "dog", "red car", "a lake", "snow"]
DIRECTIONS = F.normalize(torch.randn(len(WORDS), 10, generator=torch.Generator().manual_seed(5)), dim=-1)
PROJECTION = torch.randn(10, 24, generator=torch.Generator().manual_seed(6))


def encode(texts):
    return torch.stack([DIRECTIONS[WORDS.index(text)] for text in texts])


@pytest.fixture
def head():
    return TextHead(encode, PROJECTION, scale=20.0)


def embedded(target, images):
    with torch.no_grad():
        return target.embed(target.normalise(images))


def score(embedding, text, others, t, variable):
    """s − t log Σ exp(20 s_k / t) / 20 of one embedding."""
    projected = PROJECTION @ embedding
    size = projected.norm() if variable else projected.norm().detach()
    own = DIRECTIONS[text] @ projected / size
    if not others:
        return own
    cosines = torch.stack([DIRECTIONS[k] @ projected / size for k in others])
    if math.isinf(t):
        return own - cosines.mean()
    return own - t / 20 * (20 * cosines / t).logsumexp(0)


@pytest.mark.parametrize(
    ("length", "temperature", "against"),
    [
        ("constant", 2.0, None),
        ("variable", math.inf, ["dog", "snow"]),
        ("constant", math.inf, WORDS),
        ("variable", 2.0, WORDS),
    ],
)
def test_functionals_are_gradients_of_the_similarity_and_its_contrast(
    target, images, head, length, temperature, against
):
    embeddings = embedded(target, images)
    found = head.functionals(embeddings, WORDS[:3], against, temperature, length)
    for b, embedding in enumerate(embeddings):
        for text in range(3):
            others = [WORDS.index(word) for word in against or () if word != WORDS[text]]
            x = embedding.clone().requires_grad_()
            score(x, text, others, temperature, length == "variable").backward()
            torch.testing.assert_close(found[b, text], x.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["DecompX-PLUS", "GAE", "GradECLIP", "DirectPaths"])
def test_a_text_is_explained_as_the_class_of_a_head_with_the_same_row(target, grid, images, name):
    head = TextHead(encode, PROJECTION)
    texts = TextExplainer(posthoc.build(name, target, grid), head, WORDS)
    zero_shot = TargetModel(without_head(target), head=head.head(WORDS)).eval()
    expected = posthoc.build(name, zero_shot, grid)(images, torch.tensor([0, 1, 2, 3, 4]))
    torch.testing.assert_close(texts(images, torch.tensor([0, 1, 2, 3, 4])), expected, rtol=1e-3, atol=1e-5)


def without_head(target):
    model = target.backbone
    model.reset_classifier(5)
    return model


REFUSED = [
    ("' '", lambda head: head.embed(["cat", " "])),
    ("none", lambda head: head.embed([])),
    ("got 3", lambda head: head.embed([3])),
    ("[2, 7]", lambda head: head.embed(torch.ones(2, 7))),
    ("width 24", lambda head: head(torch.ones(2, 9), ["cat"])),
    ("width 24", lambda head: head.functionals(torch.ones(2, 9), ["cat"])),
    ("alone", lambda head: head.functionals(torch.ones(2, 24), ["cat"], "cat")),
    ("RISE", lambda head, target, grid: TextExplainer(posthoc.RISE(target, grid, masks=4), head, WORDS)),
    ("width 24", lambda target: clip_text_head(target, encode=lambda texts: torch.ones(len(texts), 7))),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_is_wrong_with_texts_is_refused(told, call, request):
    check_refused(request, told, call)


def test_a_head_of_texts_is_linear_where_the_scores_are(target, images):
    centre = DIRECTIONS.mean(0)
    head = TextHead(encode, PROJECTION, centre, normalise=False)
    embeddings = embedded(target, images)
    linear = torch.nn.Linear(24, 5, bias=False)
    linear.load_state_dict({"weight": (DIRECTIONS - centre) @ PROJECTION})
    torch.testing.assert_close(head.head(WORDS)(embeddings), linear(embeddings), rtol=1e-4, atol=1e-5)
    functionals = head.functionals(embeddings, WORDS)
    torch.testing.assert_close(functionals, linear.weight.detach().expand(5, -1, -1), rtol=1e-4, atol=1e-5)
