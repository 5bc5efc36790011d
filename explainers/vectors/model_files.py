"""Files of self-explaining models: what they hold, and how they are read."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.heads import COSINES, check_count
from explainers.models.scores import Score
from explainers.saved.identity import Identity
from explainers.saved.weights import (
    State,
    check_forms,
    check_identity,
    check_keys,
    describe_tensors,
    part,
    read_weights,
)
from explainers.vectors.fixed_head import READING, FixedHead, check_reading

TRANSFERRED = "transferred"
"""Value of `alpha` in the file of a model that was made by arithmetic instead of training."""

KIND = "a self-explaining model"

HEADER = {
    "class": "SelfExplaining",
    "target": {"backbone": "text", "backbone_sha256": "SHA-256"},
    "classes": "texts",
    "base_sha256": "SHA-256",
    "alpha": f"{TRANSFERRED}|positive number",
    "head": READING | {"normalise": "boolean"},
}
"""What the header of the file of a self-explaining model has."""


@dataclass(frozen=True)
class SavedModel:
    """A self-explaining model in a file.

    Attributes:
        identity: the header of the file.
        backbone: the weights of the backbone.
        head: the fixed head.
    """

    identity: Identity
    backbone: State
    head: FixedHead


def read_model(path: str | Path, target: TargetModel) -> SavedModel:
    """Read a self-explaining model with the backbone of a target."""
    identity, weights = read_weights(path, KIND, HEADER)
    forms = {f"head.{name}": form for name, form in COSINES.items()}
    forms |= {"head.patch_scale": "floats", "head.read_out?": "floats W"}
    check_forms(path, describe_tensors(target.backbone.state_dict(), "backbone.") | forms)
    width = weights.get("head.projection", weights["head.weight"]).shape[1]
    if width != target.embed_dim:
        raise InputError(f"{path}: expected a head for width {target.embed_dim}, got {width}: give another file")
    check_count(identity["classes"], len(weights["head.weight"]), path)
    check_keys({"scale": weights["head.scale"].item()}, {"scale": "positive number"}, path, "head.")
    check_reading(identity["head"] | {"read_out": weights.get("head.read_out", torch.zeros(0)).tolist()}, target, path)
    head: dict[str, Any] = part(weights, "head")
    head |= {name: head[name].item() for name in ("scale", "patch_scale")}
    head |= {name: identity["head"][name] for name in ("normalise", "reading", "blocks")}
    return SavedModel(identity, part(weights, "backbone"), FixedHead(**head))


def exported_target(model: TargetModel | nn.Module, head: str | Path, score: Score | None = None) -> TargetModel:
    """Load the model that a `SelfExplaining` exported, with its fixed head.

    Args:
        model: a target or a timm model of the same architecture.
        head: the `model.safetensors` of the export.
        score: what the logits of a timm model mean, see `TargetModel`; a target has its own.
    """
    target = copy.deepcopy(model) if isinstance(model, TargetModel) else TargetModel(model, nn.Identity(), score)
    saved, own = read_model(head, target), target.backbone_identity()
    check_identity(saved.identity["target"], {key: own[key] for key in own if key != "backbone_sha256"}, head)
    target.backbone.load_state_dict(saved.backbone)
    target.head = saved.head
    target.classes = saved.identity["classes"]
    return target.eval()
