"""Chooses the explainer that fits a model."""

import copy
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explainers import Explainer, FunctionalExplainer, VectorExplainer, posthoc
from explainers.errors import InputError, UnsupportedModel, checks_choices
from explainers.models import TargetModel
from explainers.models.functionals import class_rows
from explainers.posthoc.defaults import DEFAULT_METHODS, Purpose
from explainers.posthoc.names import labelled
from explainers.share import load
from explainers.share.catalogue import COMMANDS, WEIGHTS, for_target, not_shipped

Method = str | Path | Mapping[str, Mapping[str, Any]] | Explainer
"""What explains: `auto`, a method's name, one with options, the folder of a trained explainer, or an explainer."""

CHEAP = 25
"""Largest number of forward passes of an explainer that is chosen without a word on its cost."""

KNOWN = ("timm.", "torch.nn.", "explainers.")
"""Where layers are defined that have gradients."""


@checks_choices
def choose(target: TargetModel, method: Method = "auto", purpose: Purpose = "classes") -> tuple[Explainer, str]:
    """Build an explainer of a model.

    Args:
        target: the model to explain.
        method: `auto`: the trained explainer that is shipped for this backbone, else the first of `DEFAULT_METHODS`
            that explains the model; a line says which. Or the name of a shipped explainer, such as `anyhead`; a method
            of `explainers.posthoc`, such as `RISE`, or `{"RISE": {"masks": 500}}` with options; the folder of a trained
            explainer, or its name on the Hugging Face Hub, `hf://user/name`; or an explainer.
        purpose: what `auto` chooses an explainer for.

    Returns:
        The explainer, and its label.

    Raises:
        InputError: if there is no such method, or it cannot explain this model.
    """
    if isinstance(method, str) and method == "auto":
        return _choose_default(target, purpose)
    if isinstance(method, str) and method.lower() in COMMANDS:
        return _with_label(_load_shipped(target, method.lower()))
    if isinstance(method, Path) or isinstance(method, str) and ("/" in method or Path(method, WEIGHTS).is_file()):
        return _with_label(_load(method, target))
    if isinstance(method, str | Mapping):
        ((label, (name, options)),) = _one_entry(method)
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
        return _with_label(copy.deepcopy(method).to(target.mean.device))
    return _with_label(method)


def passes_of(explainer: Explainer) -> int:
    """Forward passes of the model for one heatmap, at most."""
    return getattr(explainer, "forward_passes", 1)


def _load(folder: str | Path, target: TargetModel) -> Any:
    """Load a trained explainer of a model, onto the model's device."""
    return load(folder, target=target).to(target.mean.device)


def _one_entry(method: str | Mapping[str, Any]) -> list[tuple[str, tuple[str, dict[str, Any]]]]:
    """The label, name and options of a method."""
    entries = list(labelled([method]).items())
    if len(entries) != 1:
        raise InputError(f"expected one method, got {len(entries)}: give one value for each option")
    return entries


def _with_label(explainer: Any) -> tuple[Explainer, str]:
    """An explainer and its label: the name of its class, or of a function."""
    return explainer, getattr(explainer, "__name__", type(explainer).__name__)


def _load_shipped(target: TargetModel, explainer: str) -> Any:
    """Load the explainer of this name that is shipped for a backbone."""
    for known in for_target(target):
        if known.explainer == explainer:
            return _load(known.folder, target)
    raise not_shipped(target, explainer)


def _choose_default(target: TargetModel, purpose: Purpose) -> tuple[Explainer, str]:
    """The trained explainer of a backbone, or the first method that explains the model, which a line then says."""
    reasons = []
    for known in for_target(target):
        try:
            return _with_label(_fits(_load(known.folder, target), target, purpose))
        except InputError as error:
            reasons.append(f"the shipped {known.explainer} does not explain it ({error})")
    none = "no trained explainer is shipped for this backbone (explainers.available() says how to train one)"
    why, lacking = "; ".join(reasons) or none, ""
    for method in DEFAULT_METHODS[purpose]:
        try:
            explainer, label = choose(target, method)
            _fits(explainer, target, purpose)
        except InputError as error:
            ((_, (name, _)),) = _one_entry(method)
            reasons.append(f"{name}: {error}")
            lacking = f"; {reasons[-1]}"
            if isinstance(error, UnsupportedModel):
                lacking = f"; {name} needs {error.wanted.removesuffix(f' for {name}')}"
            continue
        passes = passes_of(explainer)
        cost = f", with {passes} forward passes for each image" if passes > CHEAP else ""
        print_once(f"{target.name}: explained by {label}{cost}, because {why}{lacking if cost else ''}")
        return explainer, label
    raise InputError(f"expected a model that can be explained, got {target.name}: {'; '.join(reasons)}")


def _fits(explainer: Explainer, target: TargetModel, purpose: Purpose) -> Explainer:
    """Return an explainer if it explains what is wanted; what it needs of the model, it says when it is built.

    Only of layers that are neither PyTorch's nor timm's, such as quantised ones, it is not known whether they have
    gradients: with them, a cheap method explains a grey image.
    """
    if purpose == "classes" and isinstance(explainer, VectorExplainer):
        class_rows(target.head, target.embed_dim, target.mean, directions=True)  # vectors explain a linear head
    if purpose != "classes" and not isinstance(explainer, FunctionalExplainer):
        raise InputError("it explains classes alone")
    if passes_of(explainer) <= CHEAP and not all(type(part).__module__.startswith(KNOWN) for part in target.modules()):
        grey = torch.full((1, 3, *[target.grid.image_size] * 2), 128, dtype=torch.uint8, device=target.mean.device)
        with torch.no_grad():
            if purpose == "classes":
                explainer(grey, torch.zeros(1, dtype=torch.long, device=grey.device))
            elif isinstance(explainer, FunctionalExplainer):
                explainer.explain(grey, torch.ones(1, target.embed_dim, device=grey.device))
    return explainer


@cache
def print_once(line: str) -> None:
    """Print a line to the standard error, unless this process has printed it."""
    print(line, file=sys.stderr, flush=True)
