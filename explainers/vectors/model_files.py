"""What the file of a self-explaining model holds, how it is read, and the checks before a transfer."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.saved.identity import Identity, architecture_hash, weights_hash
from explainers.saved.records import first_difference
from explainers.saved.weights import check_identity, read_weights
from explainers.target import TargetModel
from explainers.training.state_dicts import State, check_alike, part
from explainers.vectors.fixed_head import FixedHead

TRANSFERRED = "transferred"
"""Value of `alpha` in the file of a model that was made by arithmetic instead of training."""


def model_identity(target: TargetModel, grid: PatchGrid, alpha: float, base_hash: str) -> Identity:
    """Describe a self-explaining model; its file holds this beside the weights of the backbone and the head.

    Args:
        target: the model, with a `FixedHead`.
        grid: the patches that it explains.
        alpha: α of its training.
        base_hash: hash of the weights of the base model's backbone.
    """
    return {
        "target": target.identity(),
        "classes": target.classes,
        "base_sha256": base_hash,
        "alpha": alpha,
        "patches_per_side": grid.side,
        "head": {"normalise": target.head.normalise, "reading": target.head.reading},
    }


def exported_target(model: TargetModel | nn.Module, head: str | Path) -> TargetModel:
    """Load the model that a `SelfExplaining` exported, with its fixed head.

    Args:
        model: a target or a timm model of the same architecture.
        head: the `model.safetensors` of the export.

    Raises:
        InputError: if the file holds another architecture, or was not written by `SelfExplaining.export`.
    """
    identity, weights = read_weights(head)
    target = copy.deepcopy(model) if isinstance(model, TargetModel) else TargetModel(model, head=nn.Identity())
    fixed = _fixed_head(identity, weights, head)
    backbone = part(weights, "backbone")
    check_alike(target.backbone.state_dict(), backbone, str(head))
    own = target.backbone_identity()
    check_identity(identity["target"], {key: own[key] for key in own if key != "backbone_sha256"}, head)
    target.backbone.load_state_dict(backbone)
    target.head = fixed
    target.classes = identity["classes"]
    return target.eval()


def _fixed_head(identity: Identity, weights: State, path: str | Path) -> FixedHead:
    """Build the head from the identity and the weights in a file."""
    if "head" not in identity or "head.weight" not in weights:
        raise InputError(f"expected the model.safetensors of a self-explaining model, got {path}")
    saved = part(weights, "head")
    tensors: dict[str, Any] = {name: saved.get(name) for name in ("weight", "projection", "bias")}
    scales: dict[str, Any] = {name: saved[name].item() for name in ("scale", "patch_scale")}
    return FixedHead(**tensors, **scales, **identity["head"])


@dataclass(frozen=True)
class Parent:
    """A model that a transferred model is computed from.

    Attributes:
        weights: state dict of the backbone.
        sha256: hash of these weights.
        head: identity of what computes logits from embeddings, and names of the classes.
    """

    weights: State
    sha256: str
    head: Identity


def read_parents(target: TargetModel, predicting: str | None, explaining: str, onto: str) -> dict[str, Parent]:
    """Read the models of a transfer, and check that arithmetic on their weights has a meaning.

    Args:
        target: the base model.
        predicting: file of the source task's model that was trained without attributions; `None` for the base model.
        explaining: file of the source task's model that was trained with attributions.
        onto: file of the target task's model that was trained without attributions.

    Returns:
        The models by role, after the base model, `base`. `predicting` is missing if it is `None`.

    Raises:
        InputError: if a file does not fit its role or the base model, or the source task's models have two heads.
    """
    parents = {"base": Parent(target.backbone.state_dict(), weights_hash(target.backbone), {})}
    if predicting is not None:
        parents["predicting"] = _read_parent("predicting", predicting, target)
    parents["explaining"] = _read_parent("explaining", explaining, target)
    parents["onto"] = _read_parent("onto", onto, target)
    if predicting is not None:
        difference = first_difference(parents["predicting"].head, parents["explaining"].head)
        if difference is not None:
            raise InputError(
                f"expected predicting and explaining models of one task with one head, got a difference in {difference}"
                f" between {predicting} and {explaining}: train the explaining one from the predicting one's head"
            )
    return parents


def _read_parent(role: str, path: str, target: TargetModel) -> Parent:
    """Read a model from a file, and check that it was trained from the base model, as its role requires."""
    identity, weights = read_weights(path)
    model = identity.get("target", {})
    if model.get("backbone") != target.name:
        raise InputError(f"expected a {target.name} for explainer.{role}, got {model.get('backbone')} in {path}")
    alpha = identity.get("alpha", 1)
    if alpha == TRANSFERRED:
        raise InputError(f"expected for explainer.{role} a model that was trained, got a transferred one in {path}")
    if (alpha < 1) != (role == "explaining"):
        raise InputError(
            f"expected for explainer.{role} a model trained {'with' if role == 'explaining' else 'without'}"
            f" attributions, got alpha={alpha} in {path}: are predicting and explaining swapped?"
        )
    base_hash = weights_hash(target.backbone)
    if identity.get("base_sha256") != base_hash:
        raise InputError(
            f"expected for explainer.{role} a model fine-tuned from the base model (SHA-256 {base_hash[:12]}), got one"
            f" from another base model ({identity.get('base_sha256', '')[:12]}) in {path}"
        )
    fixed = _fixed_head(identity, weights, path)
    fixed.reading = "patch"  # how patches are read changes no logit
    fixed.patch_scale.fill_(1)
    head = {
        "num_classes": fixed.out_features,
        "head_architecture_sha256": architecture_hash(fixed),
        "head_sha256": weights_hash(fixed),
        "classes": identity["classes"],
    }
    return Parent(part(weights, "backbone"), model["backbone_sha256"], head)
