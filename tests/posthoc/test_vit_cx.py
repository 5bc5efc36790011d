"""ViT-CX, against loops."""

import itertools

import pytest
import references_masks as slow
import torch
from test_pixel_gradients import CLASSES, MODELS, close

from explainers.posthoc.masks import RandomMasks
from explainers.posthoc.soft_masks import gaussian_noise, upsample_masks
from explainers.posthoc.vit_cx import ViTCX, attention_features, coverage_corrected_sum

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
    found = explainer.details(images[:1], CLASSES[:1])
    for i, image in enumerate(target.normalise(images[:1])):
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
