"""Tokens of hidden patches leave the sequence; the reference indexes them by hand, one image at a time."""

import pytest
import timm
import torch
from conftest import TINY_VIT, timm_model
from references import only
from timm.models.eva import Eva

from explainers.errors import InputError
from explainers.masking import PatchGrid, mask_pixels
from explainers.models import TargetModel
from explainers.models.removal import check_removal, embed_visible, masked_outputs

ROPE = TINY_VIT | {"ref_feat_shape": (4, 4)}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {}),
    "test_vit": ("test_vit", {"img_size": 64, "patch_size": 16, "embed_dim": 64, "num_heads": 2}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "pre_norm": ("vit_base_patch16_clip_224", {}),
    "average": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "average_with_prefix": ("vit_tiny_patch16_224", {"global_pool": "avg", "pool_include_prefix": True}),
    "average_without_prefix": ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}),
    "average_beside_registers": ("vit_little_patch16_reg4_gap_256", {}),
    "attention_pooling": ("vit_base_patch16_siglip_224", {}),
    "eva": ("eva_giant_patch14_224", TINY_VIT),
    "eva_rope": ("eva02_tiny_patch14_224", ROPE),
    "eva_token": ("eva02_tiny_patch14_224", ROPE | {"global_pool": "token", "num_reg_tokens": 2}),
    "eva_attention_pooling": ("eva02_tiny_patch14_224", ROPE | {"global_pool": "map"}),
    "eva_mixed_rope": ("vit_base_patch16_rope_mixed_224", {}),
    "eva_dinov3": ("vit_small_patch16_dinov3", {}),
}
AVERAGES = {"average", "average_without_prefix", "average_beside_registers", "eva", "eva_rope", "eva_dinov3"}
POOLS_PATCHES = AVERAGES | {"attention_pooling"}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def target(name):
    timm_name, arguments = MODELS[name]
    return timm_model(timm_name, as_target=True, **arguments)


@pytest.fixture
def normalised(target):
    side = target.backbone.patch_embed.img_size[0]
    return torch.randn(3, 3, side, side)


def by_hand(target, image, patches):
    """The embedding of one normalised image (C, H, W) from the tokens of `patches` alone, (D,)."""
    model = target.backbone
    tokens, rope = model.patch_embed(image[None]), None
    tokens = model._pos_embed(tokens)
    if isinstance(model, Eva):
        tokens, rope = tokens
    first = list(range(model.num_prefix_tokens))
    tokens = model.norm_pre(tokens[:, first + [len(first) + patch for patch in patches]])
    for depth, block in enumerate(model.blocks):
        if rope is None:
            tokens = block(tokens)
        else:  # per block, (heads, N, d) each, or the same for all, (N, d)
            tokens = block(tokens, rope=(rope[depth] if rope.dim() == 4 else rope)[..., patches, :])
    tokens = model.norm(tokens)
    if target.distilled:
        return tokens[0, :2].flatten()
    return model.forward_head(tokens, pre_logits=True)[0]


@pytest.mark.slow
@torch.no_grad()
def test_hidden_tokens_leave_and_the_others_keep_their_positions(target, normalised):
    count = target.backbone.patch_embed.num_patches
    grid = PatchGrid(normalised.shape[-1], normalised.shape[-1] // int(count**0.5))
    normalised = normalised[:2]
    keep = torch.rand(2, 4, count) < torch.linspace(0.2, 0.8, 4)[None, :, None]
    keep[..., 7], keep[0, 3] = False, False
    keep[1, 2], keep[0, 3, 5] = keep[0, 2].roll(1), True  # as many as another mask, and a single one
    found = masked_outputs(target, lambda embeddings: embeddings, normalised, keep, grid, "drop")
    assert found.shape == (2, 4, target.embed_dim)
    for image in range(2):
        for mask in range(4):
            expected = by_hand(target, normalised[image], keep[image, mask].nonzero().flatten().tolist())
            torch.testing.assert_close(found[image, mask], expected, rtol=1e-4, atol=1e-4)
    zero = masked_outputs(target, lambda embeddings: embeddings, normalised, keep, grid)
    assert (found - zero).abs().amax(-1).min() > 1e-3
    for chunk_size in (1, 3):
        chunked = masked_outputs(target, lambda x: x, normalised, keep, grid, "drop", chunk_size)
        torch.testing.assert_close(chunked, found, rtol=1e-4, atol=1e-4)
    alone = masked_outputs(target, lambda x: x, normalised[1:2], keep[1:2], grid, "drop")
    torch.testing.assert_close(alone, found[1:2], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_patches_prefix_tokens_remain_or_the_mean_image(target, normalised, name):
    keep = torch.zeros(3, target.backbone.patch_embed.num_patches, dtype=torch.bool)
    found = embed_visible(target, normalised, keep)
    mean_image = target.embed(torch.zeros_like(normalised))
    for image in range(3):
        expected = mean_image[image] if name in POOLS_PATCHES else by_hand(target, normalised[image], [])
        assert expected.isfinite().all()
        torch.testing.assert_close(found[image], expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(found, mean_image, atol=1e-4) == (name in POOLS_PATCHES)


@pytest.mark.parametrize("name", ["vit", "average", "attention_pooling", "eva_mixed_rope"])
def test_the_model_is_as_before_even_after_an_error(target, normalised):
    model = target.backbone
    attributes, modules = dict(vars(model)), dict(model.named_modules())
    keep = torch.rand(1, model.patch_embed.num_patches).expand(3, -1) < 0.5
    whole = target.embed(normalised)
    normalised.requires_grad_()
    embed_visible(target, normalised, keep).sum().backward()
    assert normalised.grad.abs().amax() > 0
    with pytest.raises(InputError, match="whose patches consist of those of"):
        embed_visible(target, normalised, torch.ones(3, 25, dtype=torch.bool))
    assert vars(model).keys() == attributes.keys() and dict(model.named_modules()) == modules
    assert all(vars(model)[key] is value for key, value in attributes.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules.values())
    torch.testing.assert_close(target.embed(normalised), whole)


@torch.no_grad()
def test_a_patch_of_a_coarser_grid_is_all_of_the_models_patches_in_it(make_target):
    target, images = make_target(img_size=(32, 48)), torch.randn(2, 3, 32, 48)
    coarse = torch.tensor([[True, False, False, False, True, False], [False, False, True, False, False, False]])
    found = masked_outputs(target, target.classify, images, coarse[:, None], PatchGrid((32, 48), 16), "drop")[:, 0]
    for image, patches in enumerate(([0, 1, 6, 7, 14, 15, 20, 21], [4, 5, 10, 11])):
        expected = target.classify(by_hand(target, images[image], patches))
        torch.testing.assert_close(found[image], expected, rtol=1e-4, atol=1e-4)


def test_a_finer_grid_is_refused(make_target):
    target, keep = make_target(), torch.ones(1, 1, 64, dtype=torch.bool)
    with pytest.raises(InputError, match="8 × 8 patches"):
        masked_outputs(target, target.classify, torch.randn(1, 3, 32, 32), keep, PatchGrid(32, 4), "drop")


SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)}


@pytest.mark.situation(17)
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("swin_tiny_patch4_window7_224", SWIN, "which cannot drop tokens"),
        ("test_resnet", {}, "which cannot drop tokens"),
        ("vit_tiny_r_s16_p8_224", {}, "whose stem mixes neighbouring patches"),
    ],
)
def test_models_whose_tokens_cannot_leave_are_refused(name, arguments, reason):
    with torch.device("meta"):
        target = TargetModel(timm.create_model(name, **arguments))
    keep, images = torch.ones(1, 1, 16, dtype=torch.bool), torch.randn(1, 3, 32, 32)
    with pytest.raises(InputError, match=f"expected a ViT .*got {name}, {reason}: take removal=zero or removal=black"):
        masked_outputs(target, target.classify, images, keep, PatchGrid(32, 8), "drop")
    check_removal(target, "black")


@torch.no_grad()
def test_hidden_pixels_do_not_leak():
    target = timm_model("test_vit", as_target=True)
    keep, images = torch.arange(16)[None] % 2 == 0, torch.randn(2, 1, 3, 32, 32)
    shown = mask_pixels(images[0], keep, target.grid, 0) + mask_pixels(images[1], ~keep, target.grid, 0)
    torch.testing.assert_close(embed_visible(target, images[0], keep), embed_visible(target, shown, keep))


@torch.no_grad()
@pytest.mark.parametrize("removal", ["zero", "black"])
def test_pixels_are_removed_as_by_hand(make_target, removal):
    target, images = make_target(img_size=(16, 24)), torch.randn(2, 3, 16, 24)
    keep, fill = torch.rand(2, 3, 6) < 0.5, -1.0 if removal == "black" else 0.0  # mean and deviation are 0.5
    found = masked_outputs(target, target.classify, images, keep, PatchGrid((16, 24), 8), removal, chunk_size=4)
    for image in range(2):
        for mask in range(3):
            seen = only(images[image], keep[image, mask].nonzero().flatten().tolist(), (2, 3), fill)
            expected = target.classify(target.embed(seen[None]))[0]
            torch.testing.assert_close(found[image, mask], expected, rtol=1e-4, atol=1e-4)
