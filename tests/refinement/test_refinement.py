"""Refining the heatmaps of explainers: what passes tell, and what users are told."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import references
import torch

from explainers.evaluation.passes import count_passes
from explainers.models import TargetModel
from explainers.models.functionals import class_rows, score_functionals
from explainers.posthoc import build
from explainers.refinement import Refined, refine

CLASSES = torch.tensor([3, 0, 4, 1, 1])


def functional(target, images, classes):
    with torch.no_grad():
        logits = target(images)
        return score_functionals(class_rows(target.head, 24, images), logits, 2.0, classes)


def test_of_an_additive_model_the_parts_are_found_and_every_head_reads_them(additive, images):
    target, parts = additive
    refined = refine(None, images, CLASSES, 120, target=target)
    expected = parts(target.normalise(images))
    torch.testing.assert_close(refined.vectors, expected, rtol=1e-2, atol=1e-2)
    other = torch.randn(5, 3, 24)
    torch.testing.assert_close(refined.explain(other).heatmaps.flatten(2), other @ expected.mT, rtol=1e-2, atol=2e-2)
    v = functional(target, images, CLASSES)
    torch.testing.assert_close(refined.heatmaps.flatten(1), (expected @ v[..., None])[..., 0], rtol=1e-2, atol=1e-2)
    assert (refined.errors < 0.1 * refined.heatmaps.flatten(1).std(1)[:, None, None]).all()


@pytest.mark.parametrize("fit", ["ranking", "regions", "shapley"])
def test_a_planted_patch_is_found_in_fewer_passes_than_patches(additive, images, grid, fit):
    target, parts = additive
    grey = torch.full_like(images, 127)
    grey[:, :, 8:16, 16:24] = 255
    v = functional(target, grey, CLASSES)
    sign = (parts(target.normalise(grey))[:, 6] * v).sum(-1).sign()[:, None]
    refined = refine(None, grey, CLASSES, 24, target=target, fit=fit)
    assert (sign * refined.heatmaps.flatten(1)).argmax(1).tolist() == [6] * 5


@pytest.mark.parametrize(("parts", "removal"), [((16, 24), "black"), ((12, 2, 26), "drop")])
def test_passes_in_parts_give_what_they_give_at_once(anyhead, images, parts, removal):
    images, classes = images[:2], CLASSES[:2]
    at_once = refine(anyhead, images, classes, 40, removal=removal)
    refined = refine(anyhead, images, classes, parts[0], removal=removal, fit="ranking")
    before = refined.heatmaps
    for passes in parts[1:]:
        refined.more(passes)
    assert refined.passes == 40
    torch.testing.assert_close(refined.heatmaps, at_once.heatmaps, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(refined.errors, at_once.errors, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(refined.heatmaps, before, rtol=0.01)


def test_vectors_and_their_heatmaps_as_prior_give_the_same(anyhead, target, grid, images):
    refined = refine(anyhead, images, CLASSES, 40)
    by_heatmaps = refine(lambda images, classes: anyhead(images, classes), images, CLASSES, 40, target=target)
    torch.testing.assert_close(refined.heatmaps, by_heatmaps.heatmaps, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(refined.errors, by_heatmaps.errors, rtol=1e-4, atol=1e-5)
    v = functional(target, images, CLASSES)
    torch.testing.assert_close(refined.explain(v), (refined.heatmaps, refined.errors))
    torch.testing.assert_close((refined.vectors @ v[..., None]).view(5, 4, 4), refined.heatmaps, rtol=1e-3, atol=1e-4)


def test_other_classes_and_heads_need_no_masked_pass(target, grid, images):
    prior = build("DecompX-PLUS", target, grid)
    refined = refine(prior, images, CLASSES, 32, fit="regions")
    others = (CLASSES + 1) % 5
    v = functional(target, images, others)
    with count_passes(target) as count:
        found = refined.of(others)
        explained = refined.explain(v)
    assert count.images == 10  # two passes of the prior for 5 images
    expected = refine(prior, images, others, 32, fit="regions")
    torch.testing.assert_close(found, (expected.heatmaps, expected.errors))
    assert explained.heatmaps.shape == explained.errors.shape == (5, 4, 4)
    several = refined.explain(torch.stack([-v, v], 1))
    torch.testing.assert_close((several.heatmaps[:, 1], several.errors[:, 1]), tuple(explained), rtol=1e-4, atol=1e-6)


def test_an_explainer_with_vectors_is_refined_around_the_class(anyhead, target, grid, images):
    own = Refined(target, grid, anyhead, passes=32, removal="black")
    with count_passes(target) as count:
        found = own(images, CLASSES)
    assert count.images == 5 * own.forward_passes == 5 * 33
    torch.testing.assert_close(found, refine(anyhead, images, CLASSES, 32, removal="black").heatmaps)


@pytest.mark.slow
def test_shapley_values_are_approached_on_9_patches(make_model):
    target = TargetModel(make_model(img_size=24)).eval()
    images = torch.randint(0, 256, (1, 3, 24, 24), dtype=torch.uint8)
    v = functional(target, images, torch.tensor([2]))[0]
    with torch.no_grad():
        values = references.coalition_values(lambda image: target.embed(image) @ v, target.normalise(images)[0], 3)
    expected = references.exact_shapley(values, 9).view(3, 3)
    refined = refine(None, images, torch.tensor([2]), 64, target=target, fit="shapley")
    few = (refined.heatmaps[0] - expected).square().mean()
    many = (refined.more(2000).heatmaps[0] - expected).square().mean()
    torch.testing.assert_close(refined.heatmaps.sum(), expected.sum(), rtol=1e-3, atol=1e-3)
    assert many < 0.1 * few and many < 0.006 * expected.var()


def test_refining_stops_when_it_is_precise_enough(additive, images):
    target, _ = additive
    refined = refine(None, images, CLASSES, 8, target=target).until(0.2, 512)
    assert 64 <= refined.passes < 512 and refined.precision().max() < 0.2
    assert refine(None, images, CLASSES, 8, target=target).until(9, 512).passes == 64  # fewer tell too little
    assert refine(None, images, CLASSES, 8, target=target).until(1e-9, 24).passes == 24
    assert refine(None, images, CLASSES, 8, target=target).more(2).passes == 10
    with pytest.raises(TypeError, match="tolerance"):
        refine(None, images, CLASSES, 8, target=target, tolerance=9)


def test_a_copy_of_a_model_in_training_mode_is_explained_in_eval_mode(make_model):
    cnn = TargetModel(make_model("test_resnet")).train()
    mean = cnn.backbone.bn1.running_mean.clone()
    size = cnn.grid.image_size
    refine(None, torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8), None, 8, target=cnn)
    assert torch.equal(cnn.backbone.bn1.running_mean, mean) and cnn.training


@pytest.mark.parametrize("kind", ["method", "anyhead"])
def test_threads_that_share_an_explainer_get_what_one_gets(anyhead, target, grid, images, kind):
    explainer = anyhead if kind == "anyhead" else build("DecompX-PLUS", target, grid)
    together = Barrier(3)

    def work(number):
        together.wait()
        return [refine(explainer, images[number : number + 1], None, 32, target=target).more(8)]

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(work, range(3)))
    for number, several in enumerate(found):
        alone = refine(explainer, images[number : number + 1], None, 40, target=target, fit="ranking")
        for each in several:
            torch.testing.assert_close(each.heatmaps, alone.heatmaps, rtol=1e-3, atol=1e-4)
