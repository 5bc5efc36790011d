"""Hiding groups against single passes, suspicion, and audits as files."""

import math
import shutil
from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional as F
from toys import in_memory

from explainers.auditing.audit import FILES, SUSPICIOUS, Audit, Effect
from explainers.auditing.evidence import Evidence
from explainers.auditing.groups import Centres
from explainers.auditing.hiding import DRAWS, hide, random_others
from explainers.auditing.measures import measure_groups
from explainers.auditing.suspicion import Usual, suspect
from explainers.errors import InputError
from explainers.models.scores import log_odds


def test_hiding_is_the_fall_of_the_log_odds(target, grid, images):
    hidden = torch.rand(5, 16) < 0.3
    predicted = 2
    found = hide(target, grid, images, torch.arange(5), hidden, predicted, seed=3)

    def odds(image, gone):
        seen = target.normalise(images[image : image + 1]).clone()
        for patch in gone.nonzero()[:, 0].tolist():
            row, column = 8 * (patch // 4), 8 * (patch % 4)
            seen[..., row : row + 8, column : column + 8] = 0
        with torch.no_grad():
            logits = target.classify(target.embed(seen))
        return log_odds(logits, torch.tensor([predicted]), "softmax").item(), logits.argmax().item()

    none = torch.zeros(16, dtype=torch.bool)
    others = [random_others(hidden, torch.arange(5), 3 * DRAWS + draw) for draw in range(DRAWS)]
    falls = torch.tensor([odds(i, none)[0] - odds(i, hidden[i])[0] for i in range(5)])
    chance = torch.tensor([odds(i, none)[0] - sum(odds(i, o[i])[0] for o in others) / DRAWS for i in range(5)])
    for effect, values in ((found.hidden, falls), (found.random, chance), (found.difference, falls - chance)):
        assert effect.mean == pytest.approx(values.mean().item(), abs=1e-4)
        assert effect.error == pytest.approx(values.std().item() / 5**0.5, abs=1e-4)
    assert found.flipped == sum(odds(i, hidden[i])[1] != predicted for i in range(5)) / 5


def test_random_patches_are_others_and_as_many():
    hidden = torch.zeros(3, 16, dtype=torch.bool)
    hidden[0, :5], hidden[1, 3:6], hidden[2, :12] = True, True, True
    first, second = (random_others(hidden, torch.arange(3), seed) for seed in (0, 1))
    assert first.sum(-1).tolist() == [5, 3, 4] and not (first & hidden).any()
    assert not torch.equal(first, second)
    assert torch.equal(random_others(hidden[1:2], torch.tensor([1]), 0), first[1:2])  # whatever is in the batch


CENTRES = Centres(F.normalize(torch.eye(2, 24) + 0.1, dim=-1), torch.tensor([3, 3]))


def evidence_of(images):
    """Evidence of class 3, of which a third is wrong: every other patch belongs to group 0, the others to 1."""
    labels = torch.where(torch.arange(images) < images // 3, 1, 3)
    patches = torch.rand(images, 16).argsort(-1)[:, :8].short()
    vectors = (CENTRES.directions[torch.arange(8) % 2] + 0.05 * torch.randn(images, 8, 24)).half()
    predicted, embeddings = torch.full((images,), 3), torch.randn(images, 24).half()
    return Evidence(torch.arange(images), labels, predicted, embeddings, torch.ones(images), patches, vectors)


@pytest.fixture
def audited(target, grid):
    """An audit of 12 random images with `evidence_of`."""
    images = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8)
    names = [f"{'cat' if i < 4 else 'dog'}/{'web' if i % 3 else 'own'}/{i}.png" for i in range(12)]
    classes = [f"class {i}" for i in range(5)]
    groups, centres = measure_groups(
        in_memory(evidence_of(12)),
        target,
        grid,
        CENTRES,
        names,
        classes,
        lambda numbers: (images[numbers], numbers),
        hidden=5,
    )
    return Audit(groups, classes, {"images": 12}, (4, 4), {"model": "toy"}, centres)


def test_groups_are_measured_and_ordered(audited):
    for index, group in enumerate(audited.groups):
        assert (group.index, group.class_index, group.images, group.image_share) == (index, 3, 12, 1.0)
        assert group.hidden.images == group.random.images == 5 and 0 <= group.flipped <= 1
        assert group.accuracy_with == 1.0 and group.accuracy_without is None and group.exclusive == 1.0
        assert sum(map(sum, group.positions)) == pytest.approx(1)
        assert group.places["border"] * 12 + group.places["centre"] * 4 == pytest.approx(16)
        assert group.sources == pytest.approx(8 / 12)
        assert [each.label for each in group.examples[:5]] == [1, 1, 1, 1, 3]
        assert all(each.name.endswith(f"/{each.number}.png") for each in group.examples)
    suspicions = [group.suspicion for group in audited.groups]
    assert suspicions == sorted(suspicions, reverse=True)


def test_an_audit_is_read_as_it_was_saved(audited, tmp_path):
    assert audited.save(tmp_path) == tmp_path / "results.json"
    again = Audit.load(tmp_path)
    assert all(torch.equal(getattr(again.centres, f.name), getattr(audited.centres, f.name)) for f in fields(Centres))
    assert replace(again, centres=audited.centres) == audited
    for name in FILES:
        replace(audited, numbers={"images": 13}).save(tmp_path / "other")
        shutil.copy(tmp_path / name, tmp_path / "other")
        with pytest.raises(InputError, match="results.json and groups.safetensors"):
            Audit.load(tmp_path / "other")
    for content in ("[" * 100_000, '{"results": {}}'):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(InputError, match="results.json"):
            Audit.load(tmp_path)
    with pytest.raises(InputError, match="nowhere"):
        Audit.load(tmp_path / "nowhere")


def numbers(audited, **changes):
    """A group that is in the centre as often as others, and of which nothing else is known."""
    known = {"sources": None, "accuracy_with": None, "accuracy_without": None, "places": {"border": 1.0, "centre": 1.0}}
    return replace(audited.groups[0], **(known | changes))


def test_suspicion_follows_its_formula(audited):
    causal, usual = Effect(2.0, 0.5, 9), Usual(centre=1.0)
    part = 1 - math.exp(-1.5)
    plain = numbers(audited)
    assert suspect(plain, "cat", causal, usual)[0] == pytest.approx(part * 0.5)
    assert suspect(plain, "cat", None, usual)[0] == pytest.approx(0.5 * 0.5)
    assert suspect(plain, "cat", Effect(1.0, 1.1, 9), usual) == (0.0, ())
    assert suspect(plain, "cat", causal, usual)[1][0].startswith("hiding it costs")
    assert suspect(plain, "cat", Effect(2.0, 1.1, 9), usual)[1] == ()  # not by two standard errors
    aside = numbers(audited, places={"border": 3.0, "centre": 0.5})
    suspicion, reasons = suspect(aside, "cat", causal, usual)
    assert suspicion == pytest.approx(part * 0.8)
    assert reasons[0] == "its patches lie at the border 3.0 times as often as if they lay anywhere"
    masked = replace(aside, off_object=0.9)
    assert suspect(masked, "cat", causal, usual)[0] == pytest.approx(part * 0.9)
    lost = numbers(audited, accuracy_with=0.98, accuracy_without=0.25, images_without=8)
    error = math.sqrt(0.3 * 0.7 / 10)  # of (2 + 1) / (8 + 2)
    suspicion, reasons = suspect(lost, "cat", causal, usual)
    assert suspicion == pytest.approx(part * max(0.5, 0.68 - error))
    assert reasons[0] == "without it 25% of 8 images of cat are recognised, with it 98%"
    one = numbers(audited, sources=0.8)
    assert suspect(one, "cat", causal, Usual(1.0, 0.5))[0] == pytest.approx(part * 0.6)
    assert suspect(one, "cat", causal, Usual(1.0, 1.0))[0] == pytest.approx(part * 0.5)


def test_no_suspicious_group_is_a_result(audited):
    calm, alarm = numbers(audited, suspicion=0.1), numbers(audited, suspicion=SUSPICIOUS)
    unknown = replace(alarm, hidden=None)
    assert replace(audited, groups=[unknown, calm]).suspicious == []
    assert replace(audited, groups=[unknown, calm]).conclude().endswith("; 1 were not measured")
    assert replace(audited, groups=[calm]).conclude().startswith("no suspicious group among 1:")
    audit = replace(audited, groups=[alarm, calm])
    assert audit.suspicious == [alarm] and audit.conclude().startswith("1 of 2 groups are suspicious")


def test_passes_are_bounded_and_the_most_suspicious_are_hidden(target, grid, audited, capsys):
    evidence = evidence_of(12)
    images = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8)
    names = [f"{number}.png" for number in range(12)]
    of = (
        in_memory(evidence),
        target,
        grid,
        audited.centres,
        names,
        audited.classes,
        lambda numbers: (images[numbers], numbers),
    )
    groups, _ = measure_groups(*of, hidden=4, passes=39)
    assert sum(group.hidden is not None for group in groups) == 1
    assert capsys.readouterr().err == "hidden: 1 of 2 groups, for at most 39 passes\n"
    assert all(group.hidden is None for group in measure_groups(*of, hidden=0)[0])
