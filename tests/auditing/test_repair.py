"""Repairs: rows and maps equal slow references; a planted background is taken out; heads are loaded again."""

from dataclasses import replace

import pytest
import timm
import torch
from refusals import check_refused
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from toys import in_memory

from explainers.auditing.evidence import take_evidence
from explainers.auditing.groups import Centres
from explainers.auditing.repair import (
    STRENGTHS,
    HeadEdit,
    Price,
    Repair,
    choose_strength,
    draw_images,
    find_removal,
    measure_reliance,
    neutralise_rows,
    repair,
)
from explainers.auditing.report_card import grade_heads
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.functionals import score_functionals
from explainers.models.heads import ProjectedHead

WIDTH, PATCHES = 24, 16


def contrasts(weight):
    return score_functionals(weight, torch.zeros(1, len(weight)), torch.inf)[0]


@pytest.mark.parametrize("classes", [[1], [0, 1, 2, 3]])
def test_marked_contrasts_lose_a_projection_and_nothing_else(classes):
    weight, directions = torch.randn(4, 6), torch.linalg.qr(torch.randn(6, 2)).Q
    edited = neutralise_rows(weight, classes, directions @ directions.mT)
    before, after = contrasts(weight), contrasts(edited)
    apart = torch.eye(6) - directions @ directions.mT
    assert torch.allclose((after @ directions)[classes], torch.zeros(len(classes), 2), atol=1e-5)
    assert torch.allclose(after @ apart, before @ apart, atol=1e-5)
    rest = [each for each in range(4) if each not in classes]
    assert torch.equal(edited[rest], weight[rest])


def test_two_classes_lose_the_same_whether_one_or_both_are_marked():
    weight, removal = torch.randn(2, 6), torch.randn(6, 6)
    one, both = (neutralise_rows(weight, marked, removal) for marked in ([1], [0, 1]))
    difference = weight[1] - weight[0]
    assert torch.allclose(one[1] - one[0], difference - removal @ difference, atol=1e-5)
    assert torch.allclose(both[1] - both[0], one[1] - one[0], atol=1e-5)
    alone = neutralise_rows(weight, [1], removal, compete=False)
    assert torch.allclose(alone[1], weight[1] - removal @ weight[1], atol=1e-5)


def test_a_removal_is_a_least_squares_fit():
    group, others, v, strength = torch.randn(30, 6).double(), torch.randn(50, 6).double(), torch.randn(6).double(), 3.0
    removal = find_removal(group.mT @ group / 30, others.mT @ others / 50, strength)
    rows = torch.cat([others / 50**0.5, (strength / 30) ** 0.5 * group])
    wanted = torch.cat([others @ v / 50**0.5, torch.zeros(30).double()])
    slow = torch.linalg.lstsq(rows, wanted[:, None]).solution[:, 0]
    assert torch.allclose(v - removal @ v, slow, atol=5e-3)
    directions = torch.linalg.qr(torch.randn(6, 2).double()).Q
    projection = directions @ directions.mT
    assert torch.allclose(find_removal(projection, torch.eye(6).double(), 1e6), projection, atol=1e-3)


def test_reliance_is_a_share_of_the_variance():
    scores, hidden = torch.randn(2, 50)
    slow = sum((a - b) ** 2 for a, b in zip(scores, hidden, strict=True)) / sum((hidden - hidden.mean()) ** 2)
    assert measure_reliance(scores, hidden) == pytest.approx(slow.item(), rel=1e-4)
    assert measure_reliance(5 * scores, 5 * hidden) == pytest.approx(slow.item(), rel=1e-4)


class Planted:
    """Images whose upper rows are the background, and a model that adds up vectors of patches of 8 pixels.

    A patch shows one of two objects or one of two backgrounds, in grey values 50, 100, 150 and 200; its vector is that
    of what it shows. In four of five images, background and object agree. The head relies on both.
    """

    def __init__(self, target: TargetModel, images: int = 40) -> None:
        self.target, self.grid = target, target.grid
        self.shown = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q[:4]
        self.labels = torch.arange(images) % 2
        self.backgrounds = torch.where(torch.arange(images) % 5 < 1, 1 - self.labels, self.labels)
        self.images = self.draw(self.labels, self.backgrounds)

    def draw(self, labels, backgrounds):
        kinds = torch.cat([2 + backgrounds[:, None].expand(-1, 12), labels[:, None].expand(-1, 4)], 1)
        grey = (50 * (kinds + 1)).byte().view(-1, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
        return grey.expand(-1, 3, -1, -1).contiguous()

    def decompose(self, images):
        kinds = images[:, 0, ::8, ::8].flatten(1).long() // 50 - 1
        vectors = self.shown[kinds]
        return vectors, vectors.sum(1)

    def embed(self, normalised):
        """As `decompose`, of normalised images with hidden patches, which are 0 and add nothing."""
        pixels = (normalised * self.target.std + self.target.mean)[:, 0, ::8, ::8].flatten(1) * 255
        visible = normalised[:, 0, ::8, ::8].flatten(1) != 0
        kinds = (pixels / 50).round().long().clamp(1, 4) - 1
        return (self.shown[kinds] * visible[..., None]).sum(1)


@pytest.fixture(params=["linear", "cosine"])
def planted(request, target, monkeypatch):
    model = Planted(target)
    a, b, c, d = model.shown
    weight = torch.stack([a + c, b + d, torch.zeros(WIDTH)])
    head = nn.Linear(WIDTH, 3)
    head.load_state_dict({"weight": weight, "bias": torch.tensor([0.0, 0.0, -9.0])})
    if request.param == "cosine":
        head = ProjectedHead(weight, torch.eye(WIDTH), scale=4.0)
    model.target = TargetModel(target, head=head).eval()
    model.target.classes = ["cat", "dog", "fish"]
    monkeypatch.setattr(model.target, "embed", model.embed)
    model.store = in_memory(take_evidence(model, model.images, model.labels))
    model.centres = Centres(F.normalize(model.shown, dim=-1), torch.tensor([0, 1, 0, 1]))
    model.read = lambda numbers: (model.images[list(numbers)], numbers)
    return model


def swapped_accuracy(model, head):
    points = model.decompose(model.draw(model.labels, 1 - model.labels))[1]
    return (head(points).argmax(-1) == model.labels).float().mean().item()


def test_a_background_is_taken_out_of_a_head(planted, make_target, tmp_path):
    before = planted.target.head.state_dict()
    found = repair(planted.store, planted, planted.centres, [2, 3], planted.read)
    assert swapped_accuracy(planted, planted.target.head) == 0 and swapped_accuracy(planted, found.head) == 1
    assert [price.strength for price in found.curve] == [0.0, *STRENGTHS] and found.classes == (0, 1)
    assert found.strength == min(found.curve, key=lambda price: price.reliance).strength
    best = next(price for price in found.curve if price.strength == found.strength)
    assert found.curve[0].reliance > 0.5 > 0.1 > best.reliance
    apart = draw_images(planted.store, [0, 1], 512, seed=0)[1::2]
    right = planted.store.evidence.predicted == planted.labels
    assert len(apart) == 20 and found.curve[0].accuracy == pytest.approx(right[apart].float().mean().item()) != 1
    assert found.curve[0].agreement == 1.0 and best.agreement == pytest.approx(found.curve[0].accuracy)
    assert best.accuracy == 1.0 and best.accuracy_without is None
    assert all(torch.equal(value, before[name]) for name, value in planted.target.head.state_dict().items())
    mean = [head(planted.store.evidence.embeddings.float()).mean(0) for head in (planted.target.head, found.head)]
    assert torch.allclose(*mean, atol=1e-2)
    again = TargetModel(planted.target, head=found.save(tmp_path / "head.safetensors"))
    points = torch.randn(3, WIDTH)
    assert torch.allclose(again.head(points), found.head(points), atol=1e-6)
    assert again.classes == ["cat", "dog", "fish"]
    with pytest.raises(InputError, match="a difference in"):
        TargetModel(make_target(seed=1), head=tmp_path / "head.safetensors")


def test_the_strength_may_be_chosen_on_other_images(planted):
    other = torch.randint(2, (30,)), torch.randint(2, (30,))
    images = planted.draw(*other)
    store = in_memory(take_evidence(planted, images, other[0]))
    marks = planted.centres, [2, 3], planted.read
    found = repair(planted.store, planted, *marks, held_out=(store, lambda numbers: (images[list(numbers)], numbers)))
    right = (store.evidence.predicted == other[0]).float().mean().item()
    assert found.curve[0].accuracy == pytest.approx(right) and found.curve[-1].accuracy > right + 0.2
    assert swapped_accuracy(planted, found.head) == 1


def test_a_distilled_head_becomes_a_linear_one(make_target):
    target = make_target("deit_tiny_distilled_patch16_224")
    points, removal = torch.randn(4, target.embed_dim), torch.zeros(target.embed_dim, target.embed_dim)
    same = HeadEdit(target, [1]).apply(removal)
    assert isinstance(same, nn.Linear) and torch.allclose(same(points), target.classify(points), atol=1e-4)


def test_a_report_card_compares_two_heads(planted):
    found = repair(planted.store, planted, planted.centres, [2, 3], planted.read, strength=10.0)
    has = planted.backgrounds == 0
    labels = torch.where(has, planted.store.evidence.labels, 2)  # all images without the group are fish
    evidence = replace(planted.store.evidence, labels=labels)
    card = grade_heads(in_memory(evidence), planted.target, found.head, planted.centres, [2, 3])
    after = found.head(evidence.embeddings.float()).argmax(-1)
    assert card.images == 40 and card.agreement == pytest.approx((after == evidence.predicted).float().mean().item())
    right = torch.stack([evidence.predicted == labels, after == labels]).double()
    assert card.accuracy == pytest.approx(right.mean(1).tolist())
    group, _ = card.groups
    assert found.curve == () and after.ne(evidence.predicted).any()
    assert group.images == has.sum() and group.accuracy_without == (0, 0)
    assert group.accuracy_with == pytest.approx(right[:, has].mean(1).tolist()) and group.accuracy_with[0] > 0
    assert group.share[1] < 0.2 < group.share[0]
    assert "accuracy of dog" in str(card) and "group 2 (cat): share of evidence" in str(card)


@pytest.fixture
def marked(planted):
    """Repairs marked groups, of which the fifth has no patches."""
    directions = torch.cat([planted.centres.directions, -planted.shown[:1]])
    centres = Centres(directions, torch.tensor([0, 1, 0, 1, 0]))
    return lambda *groups, **settings: repair(planted.store, planted, centres, groups, planted.read, **settings)


RISING = [Price(strength, 0.1 + strength, 1.0, None, None, None) for strength in (0.0, 1.0)]
REFUSED = [
    ("from 0 to 4", lambda marked: marked()),
    ("from 0 to 4", lambda marked: marked(5)),
    ("1, 1", lambda marked: marked(1, 1)),
    ("no patch", lambda marked: marked(4)),
    ("strength", lambda marked: marked(2, strength=torch.nan)),
    ("strength", lambda marked: marked(2, strength=1e300)),
    ("0.100", lambda: choose_strength(RISING)),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_bad_marks_and_heads_are_refused(told, call, planted, request):
    check_refused(request, told, call)


def test_timm_loads_a_repaired_head(tmp_path):
    model = timm.create_model("test_vit", num_classes=3)
    target = TargetModel(model)
    edited = HeadEdit(target, [1]).apply(torch.eye(target.embed_dim) / 2)
    found = Repair(edited, 1.0, (0,), (1,), (), (), target.backbone_identity())
    model.get_classifier().load_state_dict(load_file(found.save(tmp_path / "head.safetensors")))
    normalised = torch.rand(2, 3, 160, 160)
    assert torch.allclose(model.eval()(normalised), edited(target.eval().embed(normalised)), atol=1e-5)
