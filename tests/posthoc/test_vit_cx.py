"""ViT-CX, against loops."""

import itertools

import pytest
import references_masks as slow
import torch
from test_masks import find_helped_classes
from test_pixel_gradients import CLASSES, MODELS, close, only_one_patch

from explainers.posthoc.masks import RandomMasks
from explainers.posthoc.soft_masks import cosine_distances, gaussian_noise, upsample_masks
from explainers.posthoc.vit_cx import ViTCX, attention_features, cluster_masks, coverage_corrected_sum

TRANSFORMERS = {name: MODELS[name] for name in ("vit", "distilled", "swin")} | {
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "eva": ("eva02_tiny_patch14_224", {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["attention", "norm"])
def test_features_of_a_vit_are_those_of_its_attention_module_computed_by_hand(make_target, images, kind):
    """The model has four register tokens and a class token, which belong to no patch."""
    target = make_target("vit_small_patch14_reg4_dinov2")
    model, normalised = target.backbone, target.normalise(images)
    tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(normalised))))
    tokens = model.blocks[1].norm1(model.blocks[0](tokens))
    expected = (model.blocks[1].attn(tokens) if kind == "attention" else tokens)[:, 5:]
    found = attention_features(target, normalised, -1, kind)
    assert found.shape == (5, 4, 4, 24)
    torch.testing.assert_close(found.flatten(1, 2), expected)


@torch.no_grad()
def test_features_of_a_swin_are_those_of_its_second_to_last_stage_computed_by_hand(make_target, images):
    target = make_target(MODELS["swin"][0], **MODELS["swin"][1] | {"depths": (2, 1)})
    normalised = target.normalise(images)
    first, second = target.backbone.layers[0].blocks
    embedded = target.backbone.patch_embed(normalised)
    tokens = first(embedded)  # (B, 8, 8, 12)
    found = {kind: attention_features(target, normalised, -1, kind) for kind in ("attention", "norm")}
    torch.testing.assert_close(found["norm"], second.norm1(tokens))
    torch.testing.assert_close(found["attention"], second._attn(second.norm1(tokens)))  # its windows are shifted
    torch.testing.assert_close(attention_features(target, normalised, 0, "norm"), first.norm1(embedded))


@torch.no_grad()
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_features_lie_where_their_patch_lies(make_target, images, name):
    target = make_target(TRANSFORMERS[name][0], **TRANSFORMERS[name][1])
    changed = images[:1].clone()
    changed[..., 8:16, 24:32] = 255 - changed[..., 8:16, 24:32]
    before, after = (attention_features(target, target.normalise(each), 0, "norm") for each in (images[:1], changed))
    where = (after - before)[0].abs().amax(-1) > 1e-5
    side = len(where) // 4
    expected = torch.zeros(4 * side, 4 * side, dtype=torch.bool)
    expected[side : 2 * side, 3 * side :] = True
    assert torch.equal(where, expected)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_masks_are_their_own_clusters(count):
    masks = torch.rand(count, 4, 4)
    found, first = cluster_masks(masks, cosine_distances(masks, (16, 16)), 0.1)
    assert torch.equal(found, masks) and first.tolist() == list(range(count))


def test_what_no_mask_covers_is_zero():
    masks = torch.rand(3, 4, 4)
    masks[:, :2, :2] = 0
    scores = torch.tensor([0.2, 1.0, -0.4])
    found = coverage_corrected_sum(upsample_masks(masks, (32, 32)), scores, chunk_size=2)
    expected = slow.corrected([slow.bilinear(mask, 32) for mask in masks], scores.tolist())
    close(found.float(), expected.float())
    assert not found[:12, :12].any() and found[:12, 13:].all()
    assert not coverage_corrected_sum(upsample_masks(masks[:0], (32, 32)), scores[:0]).any()


@torch.no_grad()
def masks_by_hand(target, image, kind):
    """Compute masks of one normalised image: each channel up-sampled and scaled to [0, 1]."""
    features = attention_features(target, image[None], -1, kind)[0].permute(2, 0, 1)
    return [slow.unit(slow.bilinear(feature, image.shape[-1])) for feature in features]


@torch.no_grad()
@pytest.mark.parametrize(
    "name, settings",
    [
        ("vit", {"delta": 0.2, "sigma": 0.5, "seed": 3}),
        ("vit", {"combine": "sum"}),
        ("distilled", {"features": "norm", "released": True}),
        ("swin", {"delta": 0.05}),
    ],
)
def test_vit_cx_is_the_reference(make_target, grid, images, name, settings):
    target = make_target(TRANSFORMERS[name][0], **TRANSFORMERS[name][1])
    explainer = ViTCX(target, grid, **settings)
    found = explainer.details(images[:2], CLASSES[:2])
    for i, image in enumerate(target.normalise(images[:2])):
        masks = masks_by_hand(target, image, settings.get("features", "attention"))
        groups = slow.clusters(masks, explainer.delta)
        assert 1 < len(groups) < len(masks)
        noises = explainer.sigma * gaussian_noise(torch.arange(len(masks)), image.shape, explainer.seed)
        arguments = masks, explainer.delta, noises, 4, explainer.released, explainer.combine
        close(found.heatmaps[i], slow.vit_cx(target.score_images, image, CLASSES[i], *arguments).float(), 1e-4)
        cosines = [1 - slow.distance(*pair) for pair in itertools.combinations(masks, 2)]
        assert found.numbers["mask_similarity"][i].item() == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
        assert found.numbers["masks"][i] == len(groups)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"sigma": 0.0, "combine": "sum"}])
def test_random_masks_are_those_of_rise_with_debiased_impacts_and_coverage_corrected(target, grid, images, settings):
    found = ViTCX(target, grid, random=9, seed=2, chunk_size=4, **settings).details(images[:2], CLASSES[:2])
    drawn = RandomMasks(9, size=(32, 32), seed=2, device=images.device)
    masks = [slow.rise_mask(drawn.cells[i], *drawn.shifts[i].tolist(), 32) for i in range(9)]
    noises = settings.get("sigma", 0.1) * gaussian_noise(torch.arange(9), (3, 32, 32), 2)
    for i, image in enumerate(target.normalise(images[:2])):
        arguments = masks, 0, noises, 4, False, settings.get("combine", "corrected")
        close(found.heatmaps[i], slow.vit_cx(target.score_images, image, CLASSES[i], *arguments).float(), 1e-4)
    assert found.numbers["masks"].tolist() == [9, 9] and found.numbers["mask_similarity"].isnan().all()


@torch.no_grad()
def test_the_coverage_is_the_mean_of_the_masks_for_every_class(target, grid, images):
    explainer = ViTCX(target, grid, combine="coverage")
    found, normalised = explainer.details(images, CLASSES), target.normalise(images)
    for i, own in enumerate(explainer.masks(normalised)):
        close(found.pixels[i], own.masks(torch.arange(len(own)))[:, 0].mean(0))
    assert explainer.ignores_classes and explainer.forward_passes == 1
    assert torch.equal(explainer(images, (CLASSES + 1) % 5), found.heatmaps)
    assert found.numbers.keys() == {"masks", "mask_similarity"}


@torch.no_grad()
def test_images_whose_masks_hardly_lower_the_probability_are_overdetermined(target, grid, images):
    target.head.weight.zero_()
    target.head.bias.copy_(torch.tensor([5.0, 0, 0, 0, 0]))  # class 0 has .97 under every mask
    numbers = ViTCX(target, grid).details(images[:2], torch.tensor([0, 1])).numbers
    assert numbers["overdetermined"].tolist() == [1, 0]
    assert numbers["impact_variance"][0].item() == pytest.approx(0, abs=1e-6) and numbers["impact_variance"][1].isnan()


def test_channels_that_are_constant_are_no_masks(make_target, grid, images):
    target = make_target()
    projection = target.backbone.blocks[-1].attn.proj
    with torch.no_grad():
        projection.weight[:20] = 0
        projection.bias[:20] = 0.3
        found = ViTCX(target, grid, delta=0.0).masks(target.normalise(images))
        assert [own.noise.tolist() for own in found] == [list(range(4))] * 5
        assert ViTCX(target, grid)(images, CLASSES).isfinite().all()
        projection.weight.zero_()
    assert not ViTCX(target, grid)(images, CLASSES).any()
    with torch.no_grad():
        projection.weight[0] = 1.0
    assert ViTCX(target, grid)(images, CLASSES).isfinite().all()


def test_a_hook_is_removed_when_the_model_fails(target, images):
    with pytest.raises(Exception, match="."):
        attention_features(target, images.float()[:, :1], -1, "attention")
    assert not any(module._forward_hooks for module in target.modules())


@pytest.mark.parametrize("settings", [{"features": "norm", "delta": 0.0, "sigma": 0.01}, {"random": 400, "sigma": 0.0}])
def test_the_patch_that_the_target_sees_is_found(target, grid, images, settings):
    """With every channel as a mask and little noise, or with many random masks."""
    blind = only_one_patch(target, 1 * 4 + 3)
    classes, gain = find_helped_classes(blind, images)
    helped = gain > (0.3 if "random" in settings else 0.1)  # the finite number of random masks makes noise
    assert helped.any()
    explanation = ViTCX(blind, grid, **settings).details(images, classes)
    assert (explanation.heatmaps.flatten(1).argmax(1)[helped] == 1 * 4 + 3).all()
    peaks = explanation.pixels.flatten(1).argmax(1)[helped]
    assert (peaks // 32 // 8 == 1).all() and (peaks % 32 // 8 == 3).all()
