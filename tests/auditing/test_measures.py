"""Hiding groups against single passes, suspicion, and audits as files."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional as F

from explainers.auditing.audit import Audit, Effect
from explainers.auditing.evidence import Evidence
from explainers.auditing.groups import Centres
from explainers.auditing.hiding import DRAWS, hide, random_others
from explainers.auditing.measures import measure_groups
from explainers.auditing.suspicion import suspect
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


class Shards:
    """Evidence in memory, as one shard."""

    def __init__(self, evidence):
        self.evidence = evidence

    def shards(self):
        yield self.evidence


@pytest.fixture
def audited(target, grid):
    """An audit of 12 random images, whose patches have random vectors, and two groups of the predicted class."""
    images = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8)
    predicted = torch.full((12,), 3)
    patches = torch.rand(12, 16).argsort(-1)[:, :8].short()
    centres = Centres(F.normalize(torch.randn(2, 24), dim=-1), torch.tensor([3, 3]))
    vectors = (centres.directions[torch.arange(8) % 2] + 0.1 * torch.randn(12, 8, 24)).half()
    labels = torch.where(torch.arange(12) < 4, 1, 3)
    evidence = Evidence(
        torch.arange(12), labels, predicted, torch.randn(12, 24).half(), torch.ones(12), patches, vectors
    )
    names = [f"{'cat' if i < 4 else 'dog'}/{'web' if i % 3 else 'own'}/{i}.png" for i in range(12)]
    classes = [f"class {i}" for i in range(5)]
    groups, centres = measure_groups(
        Shards(evidence), target, grid, centres, names, classes, lambda numbers: images[numbers], hidden=5
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
    (tmp_path / "results.json").write_text('{"results": {}}')
    with pytest.raises(InputError, match="expected the results.json of an audit"):
        Audit.load(tmp_path)
    with pytest.raises(InputError, match="^expected the folder of an audit"):
        Audit.load(tmp_path / "other")


def test_groups_beside_the_centre_are_suspicious_if_predictions_hang_on_them(audited):
    group = replace(audited.groups[0], places={"centre": 0.5}, accuracy_without=None, sources=None)
    costs = Effect(1.0, 0.1, 5)
    assert suspect(group, costs, "cat")[0] == pytest.approx((0.75 * (1 - math.exp(-1))) ** 0.5)
    assert suspect(group, Effect(1.0, 0.6, 5), "cat")[0] == 0  # not beyond two standard errors
    assert suspect(replace(group, places={"centre": 2.5}), costs, "cat")[0] == 0
