"""Reads the files of self-explaining models."""

import copy
from pathlib import Path
from typing import Any

from torch import nn

from explainers.errors import InputError
from explainers.saved.weights import check_identity, read_weights
from explainers.target import TargetModel
from explainers.training.state_dicts import check_alike, part
from explainers.vectors.projections import FixedHead


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
    if "head" not in identity or "head.weight" not in weights:
        raise InputError(f"expected the model.safetensors of a self-explaining model, got {head}")
    check_alike(target.backbone.state_dict(), part(weights, "backbone"), str(head))
    own = target.backbone_identity()
    check_identity(identity["target"], {key: own[key] for key in own if key != "backbone_sha256"}, head)
    fixed = part(weights, "head")
    target.backbone.load_state_dict(part(weights, "backbone"))
    tensors: dict[str, Any] = {name: fixed.get(name) for name in ("weight", "projection", "bias")}
    scales: dict[str, Any] = {name: fixed[name].item() for name in ("scale", "patch_scale")}
    target.head = FixedHead(**tensors, **scales, **identity["head"])
    target.classes = identity["classes"]
    return target.eval()
