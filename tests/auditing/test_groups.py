"""Groups of evidence: found again where they were planted, and numbers equal to those of slow loops."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from refusals import check_refused
from torch import nn
from torch.nn import functional as F

from explainers.auditing.evidence import Evidence, functionals
from explainers.auditing.groups import Centres, assign, find_groups
from explainers.auditing.tally import PRESENT, inside_masks, tally

CLASSES, WIDTH, PATCHES, KEPT = 3, 8, 16, 6


class Shards:
    """Evidence in memory, cut into shards of `size` images."""

    def __init__(self, evidence, size=1000):
        parts = [getattr(evidence, field.name).split(size) for field in fields(Evidence)]
        self.parts = [Evidence(*part) for part in zip(*parts, strict=True)]

    def shards(self):
        yield from self.parts


@pytest.fixture
def model():
    known = {"score": "softmax", "num_classes": CLASSES, "name": "toy", "mean": torch.zeros(1)}
    return SimpleNamespace(head=nn.Linear(WIDTH, CLASSES), **known)


def planted(model, images=60, noise=0.1):
    """Images of classes 0 and 1; each patch has one of two directions of its class, or opposes the class."""
    predicted = torch.arange(images) % 2
    v = functionals(model, torch.zeros(2, WIDTH), torch.arange(2)).detach()
    apart = torch.linalg.qr(torch.cat([v, torch.randn(2, WIDTH)]).mT).Q.mT[2:]  # orthogonal to both v
    truth = F.normalize(F.normalize(v, dim=-1)[:, None] + torch.stack([apart, -apart], 1), dim=-1)  # (2, 2, D)
    kinds = torch.randint(2, (images, KEPT))
    vectors = truth[predicted[:, None], kinds] + noise * torch.randn(images, KEPT, WIDTH)
    vectors[:, -1] = -v[predicted]
    labels = torch.where(torch.arange(images) % 7 == 0, 2, predicted)
    patches = torch.rand(images, PATCHES).argsort(-1)[:, :KEPT].short()
    embeddings = torch.randn(images, WIDTH).half()
    totals = torch.rand(images) + 5
    return Evidence(torch.arange(images), labels, predicted, embeddings, totals, patches, vectors.half()), truth


def test_planted_groups_are_found(model):
    evidence, truth = planted(model)
    centres = find_groups(Shards(evidence, 7), model, groups=2, seed=0)
    assert centres.classes.tolist() == [0, 0, 1, 1]
    cosines = centres.directions @ truth.flatten(0, 1).mT
    assert (cosines.amax(0) > 0.98).all() and (cosines.amax(1) > 0.98).all()
    again = find_groups(Shards(evidence, 60), model, groups=2, seed=0)
    assert torch.allclose(centres.directions, again.directions, atol=1e-6)  # shards do not matter


def test_the_number_of_groups_is_chosen(model):
    evidence, truth = planted(model)
    centres = find_groups(Shards(evidence), model)
    assert centres.classes.bincount().tolist() == [2, 2]


def test_classes_with_few_images_are_left_out(model):
    evidence, _ = planted(model)
    evidence.predicted[:3] = 2
    with pytest.warns(UserWarning, match=r"left out: 1 class with fewer than 10 images or patches of evidence: 2$"):
        centres = find_groups(Shards(evidence), model, groups=2)
    assert set(centres.classes.tolist()) == {0, 1}


REFUSED = [
    ("groups", lambda model: find_groups(Shards(planted(model, images=20)[0]), model, groups=51)),
    ("8", lambda model: find_groups(Shards(planted(model, images=8)[0]), model)),  # too few images of every class
    ("evidence", lambda model: find_groups(Shards(without_evidence(planted(model)[0])), model)),
]


def without_evidence(evidence):
    return replace(evidence, vectors=0 * evidence.vectors)


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_bad_settings_are_named(told, call, request):
    check_refused(request, told, call)


def test_classes_that_do_not_fit_take_further_passes(model, monkeypatch):
    evidence, _ = planted(model)
    at_once = find_groups(Shards(evidence), model, groups=2)
    monkeypatch.setattr("explainers.auditing.groups.BYTES", 1)
    assert torch.equal(find_groups(Shards(evidence), model, groups=2).directions, at_once.directions)


@torch.no_grad()
def slow_numbers(evidence, model, centres, group):
    """The sums of one group by loops over images and patches."""
    of, numbers = int(centres.classes[group]), dict.fromkeys(NUMBERS, 0.0)
    for image in range(len(evidence.numbers)):
        predicted, label = int(evidence.predicted[image]), int(evidence.labels[image])
        v = functionals(model, evidence.embeddings[image : image + 1].float(), evidence.predicted[image : image + 1])[0]
        vectors = evidence.vectors[image].float()
        own = [p for p in range(KEPT) if (F.normalize(vectors[p], dim=0) @ centres.directions.mT).argmax() == group]
        has = len(own) >= PRESENT
        numbers["labelled_with"] += has and label == of
        numbers["right_with"] += has and label == of == predicted
        numbers["outside"] += sum(int(evidence.patches[image, p]) % 2 for p in own)
        if predicted == of:
            numbers["own"] += len(own)
            numbers["evidence"] += sum(max(float(v @ vectors[p]), 0) for p in own)
            numbers["images"] += has
    return numbers


NUMBERS = "labelled_with", "right_with", "outside", "own", "evidence", "images"


def test_sums_are_those_of_loops_in_shards_of_any_size(model):
    evidence, truth = planted(model, noise=0.4)
    evidence.labels[5:9] = -1
    centres = Centres(truth.flatten(0, 1), torch.tensor([0, 0, 1, 1]))
    masks = (torch.arange(PATCHES) % 2 == 0).expand(60, -1)  # odd patches are off the object
    sources = [f"site{number % 3}" for number in range(60)]
    whole, parts = (
        tally(Shards(evidence, size), model, centres, PATCHES, inside_masks(masks), sources, hidden=4)
        for size in (60, 7)
    )
    for group in range(4):
        slow = slow_numbers(evidence, model, centres, group)
        assert slow["evidence"] > 0
        for name, value in slow.items():
            assert getattr(whole, name)[group].item() == pytest.approx(value, rel=1e-4), name
            assert getattr(parts, name)[group].item() == pytest.approx(value, rel=1e-4), name
    assert whole.positions.sum() == 60 * KEPT and whole.labelled.sum() == 56
    assert whole.totals[0] == pytest.approx(evidence.totals[evidence.predicted == 0].sum().item())
    assert (whole.drawn, whole.without) == (parts.drawn, parts.without)
    assert [[each.number for each in some] for some in whole.examples] == [
        [each.number for each in some] for some in parts.examples
    ]
    assert all(len(some) == 4 for some in whole.drawn) and sum(whole.sources[0].values()) == whole.images[0]


def test_examples_start_with_mistakes_and_name_their_patches(model):
    evidence, truth = planted(model)
    centres = Centres(truth.flatten(0, 1), torch.tensor([0, 0, 1, 1]))
    sums = tally(Shards(evidence), model, centres, PATCHES)
    members = assign(evidence, centres)
    for group, some in enumerate(sums.examples):
        wrong = [each.label != each.predicted for each in some]
        assert any(wrong) and wrong == sorted(wrong, reverse=True)
        for each in some:
            assert each.patches == tuple(evidence.patches[each.number][members[each.number] == group].tolist())
