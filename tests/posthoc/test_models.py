"""Every method on every kind of model: it explains, or says what the model lacks."""

from inspect import signature

import pytest
import torch

from explainers import posthoc
from explainers.errors import UnsupportedModel
from explainers.posthoc import method_names
from explainers.posthoc.patch_vectors import PatchVectors
from explainers.posthoc.white_box import Reads, WhiteBox

SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)}
MODELS = {
    "ViT-Tiny": ("vit_tiny_patch16_224", {}),
    "DeiT-Tiny distilled": ("deit_tiny_distilled_patch16_224", {}),
    "Swin-Tiny": ("swin_tiny_patch4_window7_224", SWIN),
    "ResNet": ("test_resnet", {}),
}
CAMS = ["ElementWiseCAM", "GradCAM", "GradCAMPlusPlus", "HiResCAM", "LayerCAM", "XGradCAM", "XGradCAMPlus"]
BUDGETS = {
    "SmoothGrad": {"samples": 2},
    "IntegratedGradients": {"steps": 2},
    "GradientSHAP": {"samples": 2},
    "RISE": {"masks": 50, "cells": 4},
    "LIME": {"samples": 40},
    "TAM": {"steps": 2},
    "ScoreCAM": {"block": 1},  # the last one of the ResNet has one position for such small images, as for all CAMs
    **dict.fromkeys(CAMS, {"layer": 1}),
}
REPRESENTATIVES = [
    *(
        "Saliency",
        "IntegratedGradients",
        "DeepLift",
        "RISE",
        "ScoreCAM",
        "ViTCX",
        "GradCAM",
        "LayerCAM",
        "CAM",
        "StagePaths",
    ),
    *("AttCAT", "AttnLRP", "LRP", "GAE", "TAM", "TokenTM", "MaskCLIP", "DirectPaths", "GradECLIP", "LibraGrad"),
    *("DecompX-PLUS", "DecompX-SkipPLUS", "GradCAM-PLUS", "GlobEnc-Rollout", "ALTI-SkipPLUS", "FullGrad-PLUS"),
]
"""One for each way to compute, and those that read each kind of model in another way."""
CHUNKED = [name for name in method_names() if "chunk_size" in signature(getattr(posthoc, name)).parameters]
AVERAGED = "CAM", "StagePaths"  # not for ViTs
READ_A_TRANSFORMER = WhiteBox, PatchVectors, posthoc.ViTCX


def find_missing(model, method, target, grid):
    """What a model lacks for a method, which is built for a ViT here; None if nothing."""
    if method in AVERAGED:
        return "expected a model that averages its last feature map" if "ViT" in model or "DeiT" in model else None
    explainer = posthoc.build(method, target, grid, BUDGETS.get(method))
    reads = getattr(explainer, "reads", Reads())
    if model == "ResNet" and isinstance(explainer, READ_A_TRANSFORMER) and not reads.stages:
        return "expected a transformer"
    if model == "DeiT-Tiny distilled" and isinstance(explainer, PatchVectors):
        return "expected one class token or average pooling"
    if model == "Swin-Tiny" and (reads.attention or reads.biases or isinstance(explainer, PatchVectors)):
        return "expected a model with global attention"
    return None


@pytest.mark.parametrize("model", [model for model in MODELS if model != "ViT-Tiny"])  # which test_contract has
def test_methods_explain_a_model(make_target, grid, images, model):
    architecture, size = MODELS[model]
    target, vit = make_target(architecture, **size).train(), make_target()  # as timm.create_model returns it
    statistics = {name: value.clone() for name, value in target.named_buffers()}
    explaining = [method for method in REPRESENTATIVES if not find_missing(model, method, vit, grid)]
    assert len(explaining) > 8
    for method in explaining:
        heatmaps = posthoc.build(method, target, grid, BUDGETS.get(method))(images[:2], torch.tensor([3, 0]))
        assert heatmaps.shape == (2, 4, 4) and heatmaps.isfinite().all(), method
        if model != "ResNet" or method not in AVERAGED:  # whose last map has one position for such small images
            assert (heatmaps.flatten(1).std(1) > 0).all(), method
    assert target.training and all(torch.equal(value, statistics[name]) for name, value in target.named_buffers())


@pytest.mark.parametrize("method", CHUNKED)
def test_neither_chunks_nor_inference_mode_make_a_difference(target, grid, images, method):
    classes, generator = torch.tensor([3, 0, 4, 1, 1]), torch.get_rng_state()
    options = BUDGETS.get(method, {})
    expected = posthoc.build(method, target, grid, options)(images, classes)
    chunked = posthoc.build(method, target, grid, options | {"chunk_size": 7})
    with torch.inference_mode():
        found = chunked(images.clone(), classes.clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert torch.equal(torch.get_rng_state(), generator) and not expected.requires_grad


@pytest.mark.parametrize("model", MODELS)
def test_a_method_says_what_a_model_lacks_and_all_others_are_listed(make_target, grid, model):
    architecture, size = MODELS[model]
    target, vit = make_target(architecture, **size), make_target()
    lacking = {name: find_missing(model, name, vit, grid) for name in method_names()}
    refused = {name: told for name, told in lacking.items() if told}
    assert posthoc.methods_for(target, grid) == sorted(lacking.keys() - refused)
    for name, told in refused.items():
        with pytest.raises(UnsupportedModel, match=f"{told}.*{architecture}"):
            getattr(posthoc, name)(target, grid)
    with pytest.raises(UnsupportedModel, match=f"{min(refused)}.*RISE"):
        posthoc.build(min(refused), target, grid)


@pytest.mark.situation(6)
@pytest.mark.parametrize("method", ["DecompX-PLUS", "GAE", "PathFlow", "GradCAM"])
def test_a_naflexvit_has_the_maps_of_the_vit_with_its_weights(make_target, grid, images, method):
    options = {"class_token": False, "global_pool": "avg"}
    plain, flexible = (make_target(**options, use_naflex=flex) for flex in (False, True))
    weights = {f"embeds.{name}" if "embed" in name else name: w for name, w in plain.backbone.state_dict().items()}
    weights = {name.replace("patch_embed.", ""): weight for name, weight in weights.items()}
    positions = weights["embeds.pos_embed"]
    patches = plain.backbone.patch_embed.proj.weight.permute(0, 2, 3, 1).flatten(1)
    proj = flexible.backbone.embeds.proj.weight
    weights["embeds.proj.weight"] = patches if proj.dim() == 2 else weights["embeds.proj.weight"]
    weights["embeds.pos_embed"] = positions.unflatten(1, grid.shape)
    flexible.backbone.load_state_dict(weights)
    flexible.head.load_state_dict(plain.head.state_dict())
    labels = torch.zeros(len(images), dtype=torch.long)
    expected, found = (posthoc.build(method, each, grid)(images, labels) for each in (plain, flexible))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
