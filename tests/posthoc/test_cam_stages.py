"""Class activation maps of CNNs: the outputs of the stages take the place of the tokens that enter a block."""

from functools import partial

import pytest
import torch

from explainers import posthoc
from explainers.masking import PatchGrid
from explainers.posthoc import cam
from explainers.posthoc.gradients import input_x_gradient

FORMULAS = {
    "GradCAM": cam.cam,
    "XGradCAM": cam.x_grad_cam,
    "XGradCAMPlus": partial(cam.x_grad_cam, absolute=True),
    "GradCAMPlusPlus": cam.grad_cam_plus_plus,
    "HiResCAM": input_x_gradient,
    "ElementWiseCAM": cam.element_wise_cam,
    "LayerCAM": cam.layer_cam,
}
LABELS = torch.tensor([3, 0])
GRID = PatchGrid(64, 4)


@pytest.fixture
def images():
    return torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def features_and_gradients(target, images, stage):
    """The maps (B, h, w, C) of a stage, image by image, and the gradients (B, 1, h, w, C) of the logit at them."""
    layer = target.backbone.get_submodule(target.backbone.feature_info[stage]["module"])
    found = []
    for image, label in zip(images, LABELS, strict=True):
        kept = []
        hook = layer.register_forward_hook(lambda *call, kept=kept: kept.append(call[-1]))
        logit = target.classify(target.embed(target.normalise(image[None])))[0, label]
        hook.remove()
        found.append((kept[0], torch.autograd.grad(logit, kept[0])[0][:, None]))
    maps, gradients = (torch.cat(each).movedim(-3, -1).detach() for each in zip(*found, strict=True))
    return maps, gradients


def on_grid(maps):
    """Cut every cell of a map (B, h, w) into equal parts, as many as there are patches in it."""
    times = 16 // maps.shape[-1]
    return maps.repeat_interleave(times, 1).repeat_interleave(times, 2) / times**2


@pytest.mark.parametrize(("model", "stage"), [("test_resnet", 1), ("test_convnext", -1), ("test_efficientnet", 1)])
def test_the_map_of_a_stage_is_the_formula_at_its_output(make_target, images, model, stage):
    target = make_target(model)
    features, gradients = features_and_gradients(target, images, stage)
    for name, formula in FORMULAS.items():
        expected = on_grid(formula(features, gradients)[:, 0])
        found = posthoc.build(name, target, GRID, {"layer": stage, "relu": False})(images, LABELS)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_plus_sums_the_stages_and_skip_plus_those_from_the_middle(make_target, images):
    target = make_target("test_resnet")
    maps = [posthoc.LayerCAM(target, GRID, layer=stage, relu=False)(images, LABELS) for stage in range(5)]
    for name, expected in {"PLUS": sum(maps), "SkipPLUS": sum(maps[3:])}.items():
        found = posthoc.build(f"LayerCAM-{name}", target, GRID)(images, LABELS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


TOKENS = {
    "cait_xxs24_224": {"img_size": 64, "depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 8},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2, "embed_dim": 24, "num_heads": 2},
    "hiera_tiny_224": {
        "img_size": 64,
        "stages": (1, 1, 1),
        "q_pool": 2,
        "embed_dim": 12,
        "mask_unit_size": (4, 4),
        "mask_unit_attn": (True, True, False),
    },
}


@pytest.mark.situation(6)
@pytest.mark.parametrize("model", TOKENS)
def test_blocks_that_output_patches_row_by_row_have_maps(make_target, images, model):
    target = make_target(model, **TOKENS[model])
    kept, info = [], target.backbone.feature_info[-1]
    hook = target.backbone.get_submodule(info["module"]).register_forward_hook(lambda *call: kept.append(call[-1]))
    logits = target.classify(target.embed(target.normalise(images))).gather(1, LABELS[:, None])
    hook.remove()
    (gradient,) = torch.autograd.grad(logits.sum(), kept[0])
    patches = (kept[0] * gradient).sum(-1).detach()
    expected = torch.stack([row.reshape(64 // info["reduction"], -1) for row in patches])
    found = posthoc.HiResCAM(target, PatchGrid(64, info["reduction"]))(images, LABELS)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
