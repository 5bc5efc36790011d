"""Image towers of timm with text towers of open_clip: which belong together, and which are refused."""

from functools import cache

import pytest
import timm
import torch
from clips import GELU, OPENAI, clip, image_tower, open_clip
from refusals import check_refused
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

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
        ("vit_base_patch16_siglip_256.v2_webli", "ViT-B-16-SigLIP2-256", "webli"),
    ],
)
def test_the_text_tower_follows_from_timms_name(name, model, weights):
    assert tower_of(name) == (model, weights)
    assert tower_of(name, model) == (model, weights)
    assert tower_of(name, model, "") == (model, "")


def small_tower(name):
    """The tower of a small CLIP for an image tower of 2 layers and of width 24 that computes GELU."""
    open_clip()  # with the small towers of these tests
    return text_tower(image_tower("vit_base_patch32_clip_224"), name, "")


def test_a_small_tower_with_the_same_width_and_layers_is_taken():
    assert small_tower("tiny") == TextTower("tiny", "")


WRONG = "vit_base_patch32_clip_224.openai"  # which computes GELU, and not the QuickGELU of OpenAI's weights
REFUSED = [
    ("QuickGELU", lambda: tower_of(WRONG)),
    ("metaclip_400m", lambda: tower_of(OPENAI, "ViT-B-32-quickgelu", "metaclip_400m")),
    ("ViT-B-33", lambda: tower_of(OPENAI, "ViT-B-33", "")),
    ("opena", lambda: tower_of(OPENAI, "ViT-B-32-quickgelu", "opena")),
    ("laion2b_e16", lambda: tower_of(GELU)),  # one of two that it may be
    ("ViT-B-32 openai", lambda: tower_of(GELU, "ViT-B-32", "openai")),
    ("ViT-B-16", lambda: tower_of("vit_base_patch16_224")),  # whose layout it has
    ("512", lambda: tower_of(TINYCLIP, "ViT-M-16", "")),
    ("tiny-wide", lambda: small_tower("tiny-wide")),
    ("tiny-deep", lambda: small_tower("tiny-deep")),
    ("model=tiny", lambda: small_tower("tiny-quickgelu")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_towers_of_two_models_are_refused(told, call, request):
    check_refused(request, told, call)


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
