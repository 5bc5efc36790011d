"""What AnyHead learns to explain on a backbone without classes: texts, other images, or any direction."""

from functools import partial

import pytest
import references_anyhead as slow
import torch
from references_anyhead import score_derivative
from torch.nn import functional as F
from toys import VECTORS, batch_of, fit, training

from explainers.anyhead import AnyHead, CoalitionTeacher
from explainers.anyhead.functionals import build_vocabulary
from explainers.learned.sources import Features, complete
from explainers.text import TextHead

WORDS = ["cat", "dog", "car", "tree", "a red house"]
PROJECTION = torch.randn(8, 24, generator=torch.Generator().manual_seed(3))
KINDS = ["texts", "images", "isotropic"]


def encode(texts):
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(sum(map(ord, text)))) for text in texts]
    return F.normalize(torch.stack(rows), dim=-1)


def text_head(target):
    return TextHead(encode, PROJECTION, scale=20.0)


TEXTS = {"functionals": "texts", "vocabulary": WORDS, "text_head": text_head}


def teacher_of(target, grid, kind, **settings):
    return CoalitionTeacher(target, grid, **({"functionals": kind} | (TEXTS if kind == "texts" else {}) | settings))


@pytest.fixture
def headless(make_target):
    return make_target(num_classes=0)


@pytest.fixture
def taught(headless, grid, images):
    sources = [CoalitionTeacher(headless, grid, functionals="images"), Features(headless)]
    return complete(batch_of(images, first=70), sources)


def by_loops(kind, rows):
    """The functionals of a batch, and the one of each image, written out."""
    embeddings = rows["embedding"]
    if kind == "texts":
        raw = torch.stack([sum(t * row for t, row in zip(one, PROJECTION, strict=True)) for one in encode(WORDS)])
        mean, functionals = sum(raw) / len(raw), []
        for embedding in embeddings:
            projected = torch.stack([row @ embedding for row in PROJECTION])
            logits = [20 * (one @ embedding / projected.norm()).item() for one in raw]
            best = logits.index(max(logits))
            functionals.append(torch.tensor(score_derivative((raw - mean).tolist(), logits, best, 2)))
        return raw - mean, torch.stack(functionals)
    mean, functionals = sum(embeddings) / len(embeddings), []
    for i, own in enumerate(embeddings):
        cosines = {j: (own @ e / own.norm() / e.norm()).item() for j, e in enumerate(embeddings) if j != i}
        functionals.append(embeddings[max(cosines, key=cosines.get)] - mean)
    return embeddings - mean, torch.stack(functionals)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["texts", "images"])
def test_the_loss_counts_errors_of_texts_or_of_likeness_as_loops_do(kind, headless, grid, taught):
    teacher, vectors = teacher_of(headless, grid, kind), 0.3 * torch.randn(5, 16, 24)
    expected = slow.unexplained(vectors, taught, *by_loops(kind, taught), "regions")
    assert teacher.compute(vectors, taught).item() == pytest.approx(expected, rel=1e-4)
    assert teacher.compute(0 * vectors, taught).item() == pytest.approx(1, abs=1e-5)
    learned = teacher.learned.of(taught["embedding"], taught["index"])
    for own, wanted in zip(learned, by_loops(kind, taught), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_isotropic_functionals_are_all_directions_and_one_that_the_index_of_the_image_decides(headless, grid, taught):
    teacher, vectors = teacher_of(headless, grid, "isotropic"), 0.3 * torch.randn(5, 16, 24)
    rows, own = teacher.learned.of(taught["embedding"], taught["index"])
    assert torch.equal(rows, torch.eye(24))
    expected = slow.unexplained(vectors, taught, rows, own, "regions")
    assert teacher.compute(vectors, taught).item() == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(teacher.learned.of(taught["embedding"][3:], taught["index"][3:])[1], own[3:])
    many = teacher.learned.of(torch.zeros(4000, 24), torch.arange(4000))[1]
    torch.testing.assert_close(many.mT @ many / 4000, torch.eye(24), rtol=0, atol=0.1)


@torch.no_grad()
def test_texts_are_the_classes_of_the_head_that_texts_make(headless, grid, images, taught):
    zero_shot = TEXTS["text_head"](headless).head(WORDS)
    vectors, own = torch.randn(5, 16, 24), teacher_of(headless, grid, "texts")
    found = own.compute(vectors, taught)
    headless.head = zero_shot
    torch.testing.assert_close(CoalitionTeacher(headless, grid).compute(vectors, taught), found)
    ranked, of_head = (teacher_of(headless, grid, kind, fit="ranking") for kind in ("texts", "head"))
    assert torch.equal(ranked(batch_of(images))["keep"], of_head(batch_of(images))["keep"])


def test_stored_rows_depend_on_functionals_where_they_decide_what_is_hidden_alone(target, grid):
    plain = CoalitionTeacher(target, grid).key()
    assert all(teacher_of(target, grid, kind).key() == plain for kind in KINDS)
    assert "functionals" not in CoalitionTeacher(target, grid, fit="ranking").key()
    ranked = [teacher_of(target, grid, kind, fit="ranking") for kind in ("head", "texts", "isotropic")]
    ranked += [teacher_of(target, grid, "texts", fit="ranking", vocabulary=WORDS[:4])]
    keys = [str(teacher.key()) for teacher in ranked]
    assert len({*keys}) == 4
    with torch.no_grad():
        target.head.weight += 1
    assert CoalitionTeacher(target, grid).key() == plain
    assert [str(teacher.key()) == key for teacher, key in zip(ranked, keys, strict=True)] == [False, True, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_backbone_without_a_head_trains(kind, headless, grid, images):
    explainer = AnyHead(headless, grid, VECTORS, temperature=2.0)
    fit(training(explainer, partial(teacher_of, kind=kind, pairs=2)), images, epochs=1)
    found = explainer.eval().explain(images, lambda embeddings: embeddings[:, None])
    assert found.shape == (5, 1, 4, 4) and found.isfinite().all()


def test_a_vocabulary_is_a_list_a_file_or_the_classes_of_imagenet(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("a cat\n\n  a dog \na cat\n", encoding="utf-8")
    assert build_vocabulary(str(file)) == ["a cat", "a dog"]
    names = build_vocabulary(None)
    assert (len(names), names[0]) == (1000, "tench")
