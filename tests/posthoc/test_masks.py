"""Explanations by masks, against loops."""

import itertools

import pytest
import references_masks as slow
import torch
from test_pixel_gradients import CLASSES, MODELS, close, only_one_patch

from explainers.masking import PatchGrid
from explainers.posthoc.lime import LIME
from explainers.posthoc.masks import RISE, Occlusion, RandomMasks, ScoreCAM

METHODS = {
    "occlusion": (Occlusion, {}),
    "wide occlusion": (Occlusion, {"window": 3}),
    "rise": (RISE, {"masks": 40, "cells": 3}),
    "score_cam": (ScoreCAM, {}),
    "softmax score_cam": (ScoreCAM, {"combine": "softmax"}),
    "lime": (LIME, {"samples": 60}),
    "lasso": (LIME, {"samples": 60, "regression": "lasso", "alpha": 0.001}),
}


@pytest.fixture(params=METHODS)
def method(request):
    def build(target, grid, **changes):
        kind, settings = METHODS[request.param]
        return kind(target, grid, **settings | changes).eval()

    return build


@pytest.mark.parametrize("window", [1, 3])
def test_occlusion_is_the_reference(target, grid, images, window):
    heatmaps = Occlusion(target, grid, window)(images[:2], CLASSES[:2])
    with torch.no_grad():
        for i, image in enumerate(target.normalise(images[:2])):
            expected = slow.occlusion(target.score_images, image, CLASSES[i], 4, window // 2)
            torch.testing.assert_close(heatmaps[i], expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_coarse_occlusion_hides_cells_and_interpolates_between_their_middles(target, images):
    grid = PatchGrid(32, 4, differs=True)
    method = Occlusion(target, grid, cells=4)
    assert method.forward_passes == 17
    found = method(images[:1], CLASSES[:1])[0]
    normalised = target.normalise(images[:1])
    whole = target.classify(target.embed(normalised)).softmax(-1)[0, CLASSES[0]]
    drops = torch.zeros(4, 4)
    for row in range(4):
        for column in range(4):
            hidden = normalised.clone()
            hidden[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 0
            drops[row, column] = whole - target.classify(target.embed(hidden)).softmax(-1)[0, CLASSES[0]]
    near, share = (
        [0, 0, 1, 1, 2, 2, 3, 3],
        [(0, 1), (1, 0.25), (0, 0.25), (2, 0.25), (1, 0.25), (3, 0.25), (2, 0.25), (3, 0)],
    )
    along = torch.zeros(8, 4)
    for patch, (cell, (other, weight)) in enumerate(zip(near, share, strict=True)):
        along[patch, other] += weight
        along[patch, cell] += 1 - weight
    torch.testing.assert_close(found, along @ drops @ along.T, rtol=1e-4, atol=1e-6)
    assert Occlusion(target, grid, cells=9).forward_passes == 65  # at most as many cells as patches


@pytest.mark.parametrize("size, cells", [((32, 32), 3), ((24, 40), 7)])
def test_random_masks_are_the_reference(size, cells):
    masks = RandomMasks(5, cells, 0.5, size=size, seed=3, device=torch.device("cpu"))
    found = masks(torch.arange(5))
    assert found.shape == (5, 1, *size) and found.min() >= 0 and found.max() <= 1
    for i in range(5):
        expected = slow.rise_mask(masks.cells[i], *masks.shifts[i].tolist(), size)
        torch.testing.assert_close(found[i, 0].double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(masks(torch.tensor([3])), found[3:4], rtol=0, atol=1e-6)


@torch.no_grad()
def test_rise_is_the_reference(target, grid, images):
    heatmaps = RISE(target, grid, masks=12, cells=3, probability=0.4, seed=2)(images, CLASSES)
    drawn = RandomMasks(12, 3, 0.4, size=(32, 32), seed=2, device=images.device)
    masks = [slow.rise_mask(drawn.cells[i], *drawn.shifts[i].tolist(), 32) for i in range(12)]
    for i, image in enumerate(target.normalise(images)):
        close(heatmaps[i], slow.rise(target.score_images, image, CLASSES[i], masks, 0.4, 4))


def feature_maps(target, normalised, block):
    features = target.embed_with_maps(normalised, [block])[1][0].mT
    return features.unflatten(-1, (int(features.shape[-1] ** 0.5), -1))


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit", "swin"])
def test_score_cam_is_the_reference(make_target, grid, images, name):
    target = make_target(MODELS[name][0], **MODELS[name][1])
    images = images[:1]
    explanation = ScoreCAM(target, grid, "softmax").details(images, CLASSES[:1])
    softmax, similarity = explanation.heatmaps, explanation.numbers["mask_similarity"]
    summed = ScoreCAM(target, grid, block=0)(images, CLASSES[:1])
    for i, image in enumerate(target.normalise(images)):
        features = feature_maps(target, image[None], 1)[0]
        close(softmax[i], slow.score_cam(target.score_images, image, CLASSES[i], features, 4))
        pairs = itertools.combinations([slow.unit(slow.bilinear(each, 32)) for each in features], 2)
        cosines = [1 - slow.distance(*pair) for pair in pairs]
        assert similarity[i].item() == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
        masks = [slow.unit(slow.bilinear(each, 32)) for each in feature_maps(target, image[None], 0)[0]]
        close(summed[i], slow.summed(target.score_images, image, CLASSES[i], masks, 4).float())


def test_a_grey_image_has_a_finite_map(make_target, grid, method):
    target = make_target()
    target.mean.fill_(0)
    assert method(target, grid)(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.tensor([0])).isfinite().all()


@torch.no_grad()
def find_helped_classes(target, images):
    """Return the class whose probability the image raises most above a blank image, and this increase.

    The weights of the head are multiplied to make the increase large.
    """
    target.head.weight.mul_(4)
    blank = target.score_images(torch.zeros(1, 3, 32, 32))
    gain, classes = (target.score_images(target.normalise(images)) - blank).max(1)
    return classes, gain


@pytest.mark.parametrize("name", METHODS)
def test_the_patch_that_the_target_sees_is_found(target, grid, images, name):
    kind, settings = METHODS[name]
    budget = {"rise": {"masks": 600, "cells": 4}, "lime": {"samples": 200}, "lasso": {"samples": 200}}
    blind = only_one_patch(target, 1 * 4 + 3)
    classes, gain = find_helped_classes(blind, images)
    helped = gain > (0.3 if name == "rise" else 0.1)  # the finite number of random masks makes noise
    assert helped.any()
    heatmaps = kind(blind, grid, **settings | budget.get(name, {}))(images, classes)[helped]
    if name == "wide occlusion":
        expected = torch.zeros(4, 4, dtype=torch.bool)
        expected[0:3, 2:4] = True
        assert torch.equal(heatmaps > 1e-6, expected.expand_as(heatmaps))
    elif "score_cam" not in name:  # its feature maps need not follow what the model sees
        assert (heatmaps.flatten(1).argmax(1) == 1 * 4 + 3).all()
