"""The methods that are taken where nobody names one."""

from contextlib import suppress
from typing import Any, Literal

from torch import nn

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.names import build, label_methods

Purpose = Literal["classes", "texts", "likeness"]
"""What is explained: classes, texts, or why images are alike."""

SIGNED_CAM = {"GradCAM": {"relu": False}}
"""Grad-CAM without the ReLU of its paper: refinement, texts and likeness need both signs."""

COARSE = {"Occlusion": {"cells": 7}}
"""Hides each of 7 × 7 cells: 50 passes. On 16 images and ViT-Tiny more faithful than 50 passes of KernelSHAP, on 12
images and EfficientNet-Lite0 than 50 masks of RISE; level with `refine` without a prior, which needs a known head."""

DEFAULT_METHODS: dict[Purpose, tuple[Any, ...]] = {
    "classes": ("DecompX-SkipPLUS", SIGNED_CAM, COARSE),
    "texts": ("DirectPaths", "CAM", "DecompX-SkipPLUS", SIGNED_CAM, "IntegratedGradients"),
    "likeness": ("DirectPaths", "CAM", "DecompX-SkipPLUS", SIGNED_CAM),
}
"""Methods in the order in which they are tried, if no trained explainer is known: for transformers, CNNs, any model.
For classes: by the fidelities in docs/results/posthoc.md; DecompX-PLUS, which is as faithful, marks empty corners."""

COMPARED_METHODS = (*DEFAULT_METHODS["classes"][:2], "GAE")
"""Methods that are measured beside others where none are named, if they explain the model."""

QUICK = 100
"""Largest number of forward passes of a method that is measured on many images without being asked for."""


def build_quick_method(target: TargetModel, grid: PatchGrid) -> dict[str, nn.Module]:
    """Build the first default method for classes that takes `QUICK` passes at most: label → method; empty if none."""
    for label, (name, options) in label_methods(DEFAULT_METHODS["classes"]).items():
        with suppress(InputError):
            method = build(name, target, grid, options)
            if getattr(method, "forward_passes", 1) <= QUICK:
                return {label: method}
    return {}
