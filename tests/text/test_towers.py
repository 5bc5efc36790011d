"""Image towers of timm with text towers of open_clip: which belong together, and which are refused."""

from functools import cache

import pytest
import timm
import torch
from clips import GELU, OPENAI, clip, image_tower, open_clip
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.text.towers import TextTower, computes_quick_gelu, text_tower

TINYCLIP = "vit_medium_patch16_clip_224.tinyclip_yfcc15m"


@cache
def shapes(name):
    """A model of timm, in shapes alone."""
    with torch.device("meta"):
        model = timm.create_model(name, weight_init="skip")
        return TargetModel(model, head=None if model.num_classes else nn.Identity())


def tower_of(name, *given):
    """The text tower of one of timm's models."""
    open_clip()
    return text_tower(shapes(name), *given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "weights"),
    [
        (OPENAI, "ViT-B-32-quickgelu", "openai"),
        ("vit_base_patch16_clip_224.laion2b", "ViT-B-16", "laion2b_s34b_b88k"),
        ("vit_base_patch16_siglip_256.v2_webli", "ViT-B-16-SigLIP2-256", "webli"),
        ("vit_base_patch16_siglip_256.webli_i18n", "ViT-B-16-SigLIP-i18n-256", "webli"),
    ],
)
def test_the_text_tower_follows_from_timms_name(name, model, weights):
    assert tower_of(name) == (model, weights)
    assert tower_of(name, model) == (model, weights)
    assert tower_of(name, model, "") == (model, "")


def test_a_resized_image_tower_keeps_its_text_tower():
    target = shapes("vit_base_patch16_clip_224.laion2b")
    target.backbone.set_input_size(img_size=(448, 448))
    target.backbone.pretrained_cfg["input_size"] = (3, 448, 448)  # as `as_target` does for image_size=
    open_clip()
    assert text_tower(target) == ("ViT-B-16", "laion2b_s34b_b88k")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        (
            "vit_base_patch32_clip_224.openai",
            (),
            f"computes QuickGELU, .* got vit_base_patch32_clip_224, .* GELU: set target.model.model_name={OPENAI}",
        ),
        (
            OPENAI,
            ("ViT-B-32-quickgelu", "metaclip_400m"),
            f"the text tower of {OPENAI}, which is ViT-B-32-quickgelu openai, got ViT-B-32-quickgelu metaclip_400m",
        ),
        (OPENAI, ("ViT-B-33", ""), "a model of open_clip .*, such as ViT-B-32, .* got ViT-B-33"),
        (OPENAI, ("ViT-B-32-quickgelu", "opena"), "weights of ViT-B-32-quickgelu for .* such as openai, .* opena$"),
        (GELU, (), r"one known text tower, .* \(ViT-B-32 laion2b_e16 or ViT-B-32 laion2b_s34b_b79k\)"),
        (GELU, ("ViT-B-32", "openai"), "with which ViT-B-32 openai was trained, .*: take the image tower of these"),
        ("vit_base_patch16_224", (), "got vit_base_patch16_224.augreg2_in21k_ft_in1k: .* its layout are ViT-B-16,"),
        (TINYCLIP, ("ViT-M-16", ""), "which projects 512 to 512: that is not supported"),
    ],
)
def test_towers_of_two_models_are_refused_in_one_line(name, given, line):
    with pytest.raises(InputError, match=line) as raised:
        tower_of(name, *given)
    assert "\n" not in str(raised.value)


def test_widths_and_layers_of_small_towers_are_compared():
    open_clip()  # with the small towers of these tests
    target = image_tower("vit_base_patch32_clip_224")
    assert text_tower(target, "tiny", "") == TextTower("tiny", "")
    for model, line in (
        ("tiny-wide", "of one width, got 16 of vit_base_patch32_clip_224 and 20 of tiny-wide"),
        ("tiny-deep", "got tiny-deep, whose image tower has another layout"),
        ("tiny-quickgelu", "GELU in vit_base_patch32_clip_224 and QuickGELU in tiny-quickgelu: set .* model=tiny, if"),
    ):
        with pytest.raises(InputError, match=line):
            text_tower(target, model, "")


@torch.no_grad()
def test_our_image_tower_computes_what_open_clips_computes_with_quick_gelu_alone():
    theirs = clip("tiny-quickgelu")
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    for name, equal in ((OPENAI, True), ("vit_base_patch32_clip_224.openai", False)):
        target = image_tower(name)
        assert computes_quick_gelu(target.backbone) == equal
        model = timm.create_model(name, img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=16)
        model.load_state_dict(checkpoint_filter_fn(theirs.state_dict(), model))
        target = TargetModel(model).eval()
        embeddings = target(images)
        expected = theirs.encode_image(target.normalise(images))
        assert expected.std() > 0.1
        assert torch.allclose(embeddings, expected, rtol=1e-4, atol=1e-5) == equal
        assert torch.allclose(embeddings, expected, rtol=1e-3, atol=1e-3) == equal
