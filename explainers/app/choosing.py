"""Chooses the explainer that fits a model."""

import copy
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from explainers import posthoc
from explainers.errors import InputError, UnsupportedModel, checks_choices
from explainers.masking import PatchGrid
from explainers.posthoc.names import labelled
from explainers.share import load
from explainers.share.catalogue import COMMANDS, WEIGHTS, for_target, not_shipped
from explainers.target import TargetModel

Purpose = Literal["classes", "texts", "likeness"]
"""What is explained: classes, texts, or why images are alike."""

FITTING: dict[Purpose, tuple[Any, ...]] = {
    "classes": ("DecompX-SkipPLUS", "GradCAM", {"RISE": {"masks": 500}}, "IntegratedGradients", "Occlusion"),
    "texts": ("DirectPaths", "CAM", "DecompX-SkipPLUS", "GradCAM", "IntegratedGradients"),
    "likeness": ("DirectPaths", "CAM", "DecompX-SkipPLUS", "GradCAM"),
}
"""Methods that are tried in this order, if no trained explainer is known: for transformers, CNNs, and any model. For
classes: by the fidelities in docs/results/posthoc.md; DecompX-PLUS, which is as faithful, marks empty corners."""

COMPARED = (*FITTING["classes"][:2], "GAE")
"""Methods that are compared with others where none are named, if they explain the model."""

QUICK = 100
"""Largest number of forward passes of a method that is measured on many images without being asked for."""

CHEAP = 25
"""Largest number of forward passes of an explainer that is tried before it is chosen."""


@checks_choices
def choose(target: TargetModel, method: Any = "auto", purpose: Purpose = "classes") -> tuple[Any, str]:
    """Build an explainer of a model.

    Args:
        target: the model to explain.
        method: `auto`: the trained explainer that is shipped for this backbone, else the first of `FITTING` that
            explains the model; a line says which. Or the name of a shipped explainer, such as `anyhead`; a method of
            `explainers.posthoc`, such as `RISE`, or `{"RISE": {"masks": 500}}` with options; the folder of a trained
            explainer, or its name on the Hugging Face Hub, `hf://user/name`; or an explainer.
        purpose: what `auto` chooses an explainer for.

    Returns:
        The explainer, and its label.

    Raises:
        InputError: if there is no such method, or it cannot explain this model.
    """
    if isinstance(method, str) and method == "auto":
        return _fitting(target, purpose)
    if isinstance(method, str) and method.lower() in COMMANDS:
        return _named(_shipped(target, method.lower()))
    if isinstance(method, Path) or isinstance(method, str) and ("/" in method or Path(method, WEIGHTS).is_file()):
        return _named(_loaded(method, target))
    if isinstance(method, str | Mapping):
        ((label, (name, options)),) = _entries(method)
        return posthoc.build(name, target, target.grid, options), label
    if isinstance(method, type) or not callable(method):
        raise InputError(f"expected method auto, a name, a folder or an explainer, got {method!r:.80}")
    explained = getattr(method, "target", None)
    identity = TargetModel.identity if purpose == "classes" else TargetModel.backbone_identity
    if isinstance(explained, TargetModel) and identity(explained) != identity(target):
        raise InputError(
            f"expected an explainer of this model, got one of {explained.name} with other weights: give the model"
            " explainer.target"
        )
    if (
        isinstance(method, nn.Module)
        and isinstance(explained, TargetModel)
        and explained.mean.device != target.mean.device
    ):
        return _named(copy.deepcopy(method).to(target.mean.device))
    return _named(method)


def passes_of(explainer: Any) -> int:
    """Forward passes of the model for one heatmap, at most."""
    return getattr(explainer, "forward_passes", 1)


def quick_method(target: TargetModel, grid: PatchGrid) -> dict[str, Any]:
    """Label → explainer: the first method of `FITTING` for classes that takes `QUICK` passes at most; empty if none."""
    for label, (name, options) in labelled(FITTING["classes"]).items():
        with suppress(InputError):
            method = posthoc.build(name, target, grid, options)
            if passes_of(method) <= QUICK:
                return {label: method}
    return {}


def _loaded(folder: str | Path, target: TargetModel) -> Any:
    """Load a trained explainer of a model, onto the model's device."""
    return load(folder, target=target).to(target.mean.device)


def _entries(method: str | Mapping[str, Any]) -> list[tuple[str, tuple[str, dict[str, Any]]]]:
    """The label, name and options of a method."""
    entries = list(labelled([method]).items())
    if len(entries) != 1:
        raise InputError(f"expected one method, got {len(entries)}: give one value for each option")
    return entries


def _named(explainer: Any) -> tuple[Any, str]:
    """An explainer and its label: the name of its class, or of a function."""
    return explainer, getattr(explainer, "__name__", type(explainer).__name__)


def _shipped(target: TargetModel, explainer: str) -> Any:
    """Load the explainer of this name that is shipped for a backbone."""
    for known in for_target(target):
        if known.explainer == explainer:
            return _loaded(known.folder, target)
    raise not_shipped(target, explainer)


@checks_choices
def _fitting(target: TargetModel, purpose: Purpose) -> tuple[Any, str]:
    """The trained explainer of a backbone, or the first method that explains the model, which a line then says."""
    reasons = []
    for known in for_target(target):
        try:
            return _named(_tried(_loaded(known.folder, target), target, purpose))
        except InputError as error:
            reasons.append(f"the shipped {known.explainer} does not explain it ({error})")
    none = "no trained explainer is shipped for this backbone (explainers.available() says how to train one)"
    why, lacking = "; ".join(reasons) or none, ""
    for method in FITTING[purpose]:
        try:
            explainer, label = choose(target, method)
            _tried(explainer, target, purpose)
        except InputError as error:
            reasons.append(f"{method}: {error}")
            lacking = f"; {reasons[-1]}"
            if isinstance(error, UnsupportedModel):
                lacking = f"; {method} needs {error.wanted.removesuffix(f' for {method}')}"
            continue
        passes = passes_of(explainer)
        cost = f", with {passes} forward passes for each image" if passes > CHEAP else ""
        tell(f"{target.name}: explained by {label}{cost}, because {why}{lacking if cost else ''}")
        return explainer, label
    raise InputError(f"expected a model that can be explained, got {target.name}: {'; '.join(reasons)}")


@checks_choices
@torch.no_grad()
def _tried(explainer: Any, target: TargetModel, purpose: Purpose) -> Any:
    """Let an explainer that is fast explain a grey image, and return it; an InputError says what the model lacks."""
    side = target.grid.image_size
    grey = torch.full((1, 3, side, side), 128, dtype=torch.uint8, device=target.mean.device)
    if passes_of(explainer) > CHEAP:
        return explainer
    if purpose == "classes":
        explainer(grey, torch.zeros(1, dtype=torch.long, device=grey.device))
    elif hasattr(explainer, "explain"):
        explainer.explain(grey, torch.ones(1, target.embed_dim, device=grey.device))
    else:
        raise InputError("it explains classes alone")
    return explainer


@cache
def tell(line: str) -> None:
    """Print a line to the standard error, once."""
    print(line, file=sys.stderr, flush=True)
