"""Embeddings of masked images as a teacher of vectors c_z; with the Shapley kernel, these are Shapley values."""

from functools import partial

import pytest
import references
import references_anyhead as slow
import torch
from conftest import timm_model
from references_anyhead import score_derivative
from torch import nn
from toys import batch_of, distance, game, members

from explainers.anyhead import CoalitionTeacher
from explainers.anyhead.coalition_teacher import RANKED_BY, coalition_errors, coalition_sums
from explainers.learned.sources import Features, complete
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.functionals import score_functionals
from explainers.posthoc import build
from explainers.refinement.coalitions import region_coalitions
from explainers.runtime.sampling import stream
from explainers.shapley.coalition_draws import shapley_coalitions
from explainers.shapley.shapley import make_efficient

GRID = PatchGrid(image_size=24, patch_size=8)
CLASSES = torch.tensor([0, 2, 1, 1, 0])
FITS = ["regions", "uniform", "mixed", "shapley"]
UNWEIGHED = FITS[:3]
EVERYTHING = frozenset(range(9))


@pytest.fixture
def target(make_target):
    """It sees 24 × 24 pixels in 3 × 3 patches, and so has 512 coalitions."""
    return make_target(img_size=24)


@pytest.fixture
def images(images):
    return images[:, :, :24, :24].contiguous()


@pytest.fixture(scope="module")
def played():
    """Of one image: the embeddings of all coalitions, their exact Shapley values, and those of the logits; the head."""
    target = TargetModel(timm_model(img_size=24)).eval()
    image = torch.randint(0, 256, (3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    values, exact = game(target, image, target.embed)
    with torch.no_grad():
        logits = {coalition: target.classify(embedding[None])[0] for coalition, embedding in values.items()}
    return values, exact, references.exact_shapley(logits, 9), target.head.weight.detach()


@pytest.fixture
def additive(target):
    """A model whose embedding is a constant and a sum over patches, in which hidden ones are 0: (model, vectors of)."""
    patches = nn.Conv2d(3, 24, 8, stride=8, bias=False).requires_grad_(False)
    target.embed = lambda normalised: 3 + patches(normalised).sum((2, 3))
    return target, lambda images: patches(target.normalise(images)).flatten(2).mT


def taught(teacher, images, epoch=0):
    """All rows that the loss of a teacher reads."""
    return complete(batch_of(images), [teacher, Features(teacher.target)], epoch)


def coalition_loss(errors, difference, rows, functionals):
    of_errors, of_differences = coalition_sums(errors, difference, rows, functionals)
    return (of_errors / of_differences).mean()


def ranked(target, **settings):
    return CoalitionTeacher(target, GRID, fit="ranking", **settings)


@pytest.mark.parametrize("fit", FITS)
def test_vectors_whose_sums_are_the_embeddings_have_no_loss(additive, images, fit):
    target, vectors_of = additive
    teacher = CoalitionTeacher(target, GRID, pairs=12, fit=fit)
    rows, vectors = taught(teacher, images, epoch=3), vectors_of(images)
    assert teacher.compute(vectors, rows) < 1e-9
    assert teacher.compute(vectors + 0.3 * vectors.std() * torch.randn_like(vectors), rows) > 0.01
    nothing = teacher.compute(torch.zeros_like(vectors), rows)
    if fit in UNWEIGHED:
        assert nothing == pytest.approx(1, abs=1e-5)
    else:  # every patch then gets the same share of what is missing
        assert 0.01 < nothing < 1


@pytest.mark.parametrize("fit", FITS)
def test_the_loss_is_that_of_loops(target, images, fit):
    teacher = CoalitionTeacher(target, GRID, pairs=6, fit=fit)
    rows, vectors, head = taught(teacher, images), 0.3 * torch.randn(5, 9, 24), torch.randn(3, 24)
    functionals = torch.randn(5, 24)
    found = coalition_loss(*coalition_errors(vectors, rows, fit), head, functionals)
    assert found.item() == pytest.approx(slow.unexplained(vectors, rows, head, functionals, fit), rel=1e-4)
    head, logits = target.head.weight.detach(), target(images).detach().tolist()
    functionals = [score_derivative(head.tolist(), z, z.index(max(z)), temperature=2) for z in logits]
    own = coalition_loss(*coalition_errors(vectors, rows, fit), head - head.mean(0), torch.tensor(functionals))
    torch.testing.assert_close(teacher.compute(vectors, rows), own)


def test_mixed_coalitions_are_half_regions_and_half_single_patches(target, images):
    keep = taught(CoalitionTeacher(target, GRID, pairs=5, fit="mixed"), images)["keep"]
    index, seed = torch.arange(5), stream("coalitions", 0, 0)
    assert torch.equal(keep[:, 3:], region_coalitions(index, GRID.shape, 2, seed))
    sizes = keep[:, :3].sum(-1)
    assert ((sizes > 0) & (sizes < GRID.num_patches)).all() and sizes.unique().numel() > 2


def test_an_image_that_no_mask_changes_does_not_count():
    errors, difference, head, v = torch.randn(3, 4, 6), torch.randn(3, 4, 6), torch.randn(5, 6), torch.randn(3, 6)
    expected = coalition_loss(errors[:2], difference[:2], head, v[:2])
    errors[2] = difference[2] = 0
    torch.testing.assert_close(coalition_loss(errors, difference, head, v), expected)
    assert coalition_loss(0 * errors, 0 * difference, head, v) == 0


def embedding_of(target, image, patches, removal):
    """G (D,) of one normalised image of which only `patches` are left; mean and deviation of the pixels are 0.5."""
    if removal != "drop":
        return target.embed(references.only(image, patches, 3, {"zero": 0.0, "black": -1.0}[removal])[None])[0]
    model = target.backbone
    tokens = model._pos_embed(model.patch_embed(image[None]))[:, [0, *(1 + patch for patch in sorted(patches))]]
    return model.norm(model.blocks(tokens))[0, 0]


@torch.no_grad()
@pytest.mark.parametrize("removals", [["zero"], ["drop", "zero", "black"]], ids="-".join)
def test_rows_are_differences_of_embeddings_of_what_is_left_and_removals_take_turns(target, images, removals):
    teacher_of = partial(CoalitionTeacher, target, GRID, pairs=5, chunk_size=7)
    rows = teacher_of(removals=removals)(batch_of(images, first=70), epoch=2)
    shapes = {"keep": (5, 5, 9), "difference": (5, 5, 24), "blank": (5, 24)}
    assert {name: tuple(row.shape) for name, row in rows.items()} == shapes
    assert torch.equal(rows["keep"], teacher_of()(batch_of(images, first=70), epoch=2)["keep"])
    for i, image in enumerate(target.normalise(images)):
        blanks = [embedding_of(target, image, set(), removal) for removal in removals]
        torch.testing.assert_close(rows["blank"][i], sum(blanks) / len(blanks), rtol=1e-4, atol=1e-5)
        for m, coalition in enumerate(members(rows["keep"][i])):
            removal = removals[m % len(removals)]
            pair = [embedding_of(target, image, each, removal) for each in (coalition, EVERYTHING - coalition)]
            torch.testing.assert_close(rows["difference"][i, m], pair[0] - pair[1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_a_coalition_and_its_complement_have_in_common_cancels(target, images):
    embed, teacher = target.embed, CoalitionTeacher(target, GRID, pairs=6)
    before = teacher(batch_of(images))
    assert (target.normalise(images) != 0).all()  # hidden pixels alone are 0

    def rows_with(term):
        """Of a model whose embedding has one more term, a function of the number of visible patches."""

        def changed(normalised):
            seen = nn.functional.max_pool2d(normalised.abs().amax(1), 8) > 0
            return embed(normalised) + term(seen.float().sum((1, 2)))[:, None]

        target.embed = changed
        return teacher(batch_of(images))

    for common in (lambda k: 2 + k * (9 - k), lambda k: (k - 4.5).abs()):
        rows = rows_with(common)
        torch.testing.assert_close(rows["difference"], before["difference"], rtol=1e-4, atol=1e-4)
        added = common(torch.zeros(1))
        assert added > 1
        torch.testing.assert_close(rows["blank"], before["blank"] + added, rtol=1e-4, atol=1e-4)
    grown = rows_with(lambda k: k)["difference"] - before["difference"]
    expected = (2 * before["keep"].sum(-1) - 9).float()[..., None].expand(-1, -1, 24)
    torch.testing.assert_close(grown, expected, rtol=1e-4, atol=1e-4)


def rows_of(values, coalitions):
    """Rows of one image with these coalitions, in double precision."""
    differences = [values[coalition] - values[EVERYTHING - coalition] for coalition in coalitions]
    return {
        "keep": torch.tensor([[[patch in coalition for patch in range(9)] for coalition in coalitions]]),
        "difference": torch.stack(differences)[None].double(),
        "blank": values[frozenset()][None].double(),
        "embedding": values[EVERYTHING][None].double(),
    }


def minimiser(rows, fit, often=None):
    """The vectors (N, D) of the least squared error, which is linear in them and alike in every channel.

    `often` (M,) says how often each coalition is there, 1 by default.
    """
    often = torch.ones(rows["keep"].shape[1]) if often is None else often
    vectors = torch.zeros(1, 9, 24, dtype=torch.double)
    start = coalition_errors(vectors, rows, fit)[0][0]
    slopes = []
    for patch in range(9):
        moved = coalition_errors(vectors.index_fill(1, torch.tensor([patch]), 1), rows, fit)[0][0]
        slopes.append((moved - start)[:, 0])
    root = often.double().sqrt()[:, None]
    found = torch.linalg.lstsq(root * torch.stack(slopes, 1), -root * start, driver="gelsd").solution
    return make_efficient(found[None], rows["blank"], rows["embedding"])[0] if fit == "shapley" else found


def test_of_all_coalitions_the_best_vectors_are_the_shapley_values_of_the_embedding(played):
    """Each of all sizes from 1 to 8, as often as it is drawn; one of each pair is enough, which stands for both."""
    values, exact, of_logits, head = played
    drawn, number = slow.coalition_sizes(9, 0.5), [0, 9, 36, 84, 126, 126, 84, 36, 9, 0]
    proper = [coalition for coalition in values if 0 < len(coalition) < 9]
    of_pairs = [coalition for coalition in proper if 0 in coalition]
    assert (len(proper), len(of_pairs)) == (510, 255)
    assert exact.abs().max() > 0.1 and of_logits.abs().max() > 0.1
    for coalitions in (proper, of_pairs):
        often = torch.tensor([drawn[len(each)] / number[len(each)] for each in coalitions])
        found = minimiser(rows_of(values, coalitions), "shapley", often)
        torch.testing.assert_close(found, exact.double(), rtol=0, atol=1e-5)
        torch.testing.assert_close(found @ head.double().mT, of_logits.double(), rtol=0, atol=1e-4)


def test_a_fit_without_weights_is_a_regression_of_differences_on_signs_and_not_the_shapley_values(played):
    values, exact, *_ = played
    everyone = [coalition for coalition in values if 0 < len(coalition) < 9]
    few = members(shapley_coalitions(torch.tensor([0]), 9, 60, seed=0, paired=False, power=0)[0])
    for coalitions in (few, everyone):
        rows = rows_of(values, coalitions)
        expected = slow.regression(coalitions, rows["difference"][0], 9)
        for fit in UNWEIGHED:
            torch.testing.assert_close(minimiser(rows, fit), expected, rtol=0, atol=1e-6)
        assert not torch.allclose(expected, exact.double(), atol=0.01 * exact.abs().max())


def together(keep):
    """How often two patches side by side are both in the coalition, or both not."""
    squares = keep.unflatten(-1, (3, 3))
    return (squares[..., 1:] == squares[..., :-1]).float().mean().item()


@pytest.mark.parametrize("fit", FITS)
def test_coalitions_are_drawn_as_their_fit_needs_them(additive, images, fit):
    keep = CoalitionTeacher(additive[0], GRID, pairs=400, fit=fit)(batch_of(images))["keep"]
    sizes = [0, *[1 / 8] * 8, 0] if fit in UNWEIGHED else slow.coalition_sizes(9, 0.5)
    assert distance(keep.sum(-1).flatten().bincount(minlength=10), sizes) < 5
    assert not (keep[:, 1::2] == ~keep[:, ::2]).all(-1).all()  # the complements are there already
    by_chance = sum(share * (k * (k - 1) + (9 - k) * (8 - k)) / (9 * 8) for k, share in enumerate(sizes))
    if fit in ("regions", "mixed"):
        assert together(keep) > by_chance + (0.1 if fit == "regions" else 0.04)
    else:
        assert together(keep) == pytest.approx(by_chance, abs=0.03)


def test_the_unit_is_the_spread_of_vectors_without_mean_whose_sums_are_the_differences(target):
    vectors = 2 * torch.randn(40, 9, 24)
    signs = torch.randint(2, (40, 50, 9)) * 2.0 - 1
    assert CoalitionTeacher(target, GRID).unit({"difference": signs @ vectors}).item() == pytest.approx(2, rel=0.05)


@torch.no_grad()
def test_coalitions_of_a_ranking_are_the_most_important_patches_of_a_likely_class(target, images, monkeypatch):
    """Without noise, they are the top of the heatmap of the predicted class, or for every fourth of another one."""
    monkeypatch.setattr("explainers.anyhead.coalition_teacher.NOISE", 0.0)
    keep = ranked(target, pairs=16, removals=["zero", "drop"])(batch_of(images))["keep"]
    paths, logits, head = build(RANKED_BY, target, GRID), target(images), target.head.weight.detach()
    orders = {}
    for k in range(5):
        heatmaps = paths.explain(images, score_functionals(head, logits, 2.0, torch.full((5,), k))).flatten(1)
        orders |= {(i, k): heatmaps[i].argsort(descending=True).tolist() for i in range(5)}
    others = set()
    for i in range(5):
        predicted = logits[i].argmax().item()
        for m, coalition in enumerate(members(keep[i])):
            explained = {k for k in range(5) if coalition == frozenset(orders[i, k][: len(coalition)])}
            assert explained if m % 4 == 3 else predicted in explained
            others |= explained - {predicted} if m % 4 == 3 and predicted not in explained else set()
    assert others
    assert keep.sum(-1).unique().tolist() == list(range(1, 9))


@torch.no_grad()
def test_with_noise_the_coalitions_of_a_ranking_are_drawn_anew_every_epoch(target, images):
    teacher = ranked(target, pairs=3)
    first, again, *later = (teacher(batch_of(images), epoch)["keep"] for epoch in (0, 0, *range(1, 8)))
    assert torch.equal(first, again)
    assert (first != later[0]).any()
    sizes = torch.cat([first, *later], 1).sum(-1)  # of every image, in 8 epochs
    assert all(each.unique().tolist() == list(range(1, 9)) for each in sizes)
