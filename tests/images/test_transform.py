"""What a model sees of a photo, pixel for pixel as timm, torchvision and transformers compute it; and where that is."""

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image

from explainers.images.bands import see_pixels
from explainers.images.transform import ImageTransform
from explainers.models.convert import as_target
from explainers.models.preprocessing import read_processor

PHOTOS = {"wide": (431, 200), "tall": (150, 333), "tiny": (9, 7), "exact": (224, 224)}
NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
# 30 configs of timm's weights: every mode, interpolation and crop_pct that is frequent, and images that are no squares
TIMM = [
    *[("center", pct, "bicubic", (224, 224)) for pct in (0.875, 0.9, 0.95, 0.96, 0.965, 0.985, 1.0)],
    *[("center", pct, "bilinear", (224, 224)) for pct in (0.875, 0.9, 0.95, 1.0)],
    *[("center", 0.9, "bicubic", size) for size in ((160, 160), (240, 240), (256, 256), (320, 320), (384, 384))],
    *[("center", pct, "bicubic", size) for pct, size in ((1.0, (128, 256)), (0.9, (96, 64)), (0.875, (256, 128)))],
    *[("squash", pct, "bicubic", (224, 224)) for pct in (0.9, 0.95, 1.0)],
    *[("squash", 1.0, kind, (384, 384)) for kind in ("bicubic", "bilinear")],
    *[("squash", 0.95, "bicubic", (128, 256)), ("squash", 1.0, "lanczos", (64, 64))],
    *[("border", pct, "bicubic", (224, 224)) for pct in (0.9, 1.0)],
    *[("border", 1.0, "bicubic", (384, 384)), ("border", 1.0, "bicubic", (128, 256))],
]


def photo(name):
    return Image.fromarray(NOISE).resize(PHOTOS[name], Image.Resampling.BICUBIC)


def largest_difference(transform, expected):
    """The largest difference of a pixel on the four photos; `expected` gives values from 0 to 255 (C, H, W)."""
    seen = [(transform(photo(name)).float(), expected(photo(name))) for name in PHOTOS]
    return max(float((ours - theirs).abs().max()) for ours, theirs in seen)


@pytest.mark.situation(22)
@pytest.mark.parametrize("config", TIMM, ids=str)
def test_pixels_are_those_of_timm(config):
    mode, pct, interpolation, size = config
    data = {"crop_mode": mode, "crop_pct": pct, "interpolation": interpolation, "mean": (0.485, 0.456, 0.406)}
    theirs = timm.data.create_transform(input_size=(3, *size), normalize=False, **data)
    assert largest_difference(ImageTransform.from_timm(data, size), lambda photo: theirs(photo)) == 0


PRESETS = ["ResNet50_Weights.IMAGENET1K_V1", "ResNet50_Weights.IMAGENET1K_V2", "ViT_B_16_Weights.IMAGENET1K_V1"]
PRESETS += ["ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1", "EfficientNet_B3_Weights.DEFAULT", "Swin_T_Weights.DEFAULT"]


@pytest.mark.parametrize("name", PRESETS)
def test_pixels_are_those_of_torchvision(name):
    preset = torchvision.models.get_weight(name).transforms()
    mean, std = (torch.tensor(values)[:, None, None] for values in (preset.mean, preset.std))
    found = read_processor(preset)
    assert largest_difference(found.transform, lambda photo: 255 * (preset(photo) * std + mean)) < 0.01
    assert (found.mean, found.std) == (preset.mean, preset.std)


def test_an_elongated_photo_is_resized_only_where_the_model_sees_it():
    """The whole would have 80 000 columns."""
    middle = Image.fromarray(NOISE[:40, :40])
    wide = Image.new("RGB", (14_440, 40))
    wide.paste(middle, (7200, 0))
    whole = middle.resize((224, 224), Image.Resampling.BICUBIC)
    seen = ImageTransform()(wide)[:, :, 12:-12].float()  # the filter reads beyond the edges
    assert (seen - torch.from_numpy(np.array(whole)).permute(2, 0, 1)[:, :, 12:-12]).abs().max() <= 1


@pytest.mark.situation(24)
@pytest.mark.parametrize("resize", ["center", "squash", "border"])
@pytest.mark.parametrize("pct", [0.875, 1.0])
def test_a_planted_patch_is_where_the_box_puts_it(resize, pct):
    wide = Image.new("RGB", (640, 400))
    wide.paste("white", (350, 120, 390, 180))
    transform = ImageTransform((224, 224), resize, pct)
    pixels, (left, top, right, bottom) = see_pixels(wide, transform)
    bright = (pixels[0] > 127).nonzero().float()
    rows, columns = torch.stack([bright.amin(0), bright.amax(0) + 1]).T
    found = [*(left + columns * (right - left) / 224), *(top + rows * (bottom - top) / 224)]
    assert found == pytest.approx([350, 390, 120, 180], abs=2)  # half a pixel of the model's images, which is wider


@pytest.mark.parametrize("resize", ["center", "squash", "border"])
def test_what_the_model_sees_lies_beyond_the_photo_only_where_it_is_padded(resize):
    left, top, right, bottom = ImageTransform(resize=resize).box(400, 200)
    assert (left < 0 or top < 0 or right > 400 or bottom > 200) == (resize == "border")


def test_a_target_has_the_transform_of_its_config_at_its_own_size():
    model = timm.create_model("test_vit", pretrained_cfg_overlay={"crop_mode": "squash", "crop_pct": 0.9})
    expected = ImageTransform((160, 160), "squash", 0.9, "bicubic", (128, 128, 128))
    assert as_target(model).transform == expected
    assert as_target(model, image_size=96).transform == replace(expected, size=(96, 96))
