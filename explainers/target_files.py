"""Targets as files: backbone and head in one checkpoint that timm loads."""

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from timm.models import load_checkpoint

from explainers.errors import InputError
from explainers.target import DistilledHead, TargetModel


def save_target(target: TargetModel, path: Path) -> None:
    """Write backbone and head as one safetensors file, which timm loads as a checkpoint of the backbone's model."""
    weights, head = target.backbone.state_dict(), target.head
    names = target.backbone.pretrained_cfg["classifier"]
    names = (names,) if isinstance(names, str) else names
    if isinstance(head, DistilledHead):
        parts: list[Any] = [(part.weight, part.bias) for part in (head.head, head.head_dist)]
    else:  # of a distilled DeiT's two classifiers timm takes the mean
        parts = [(weight * len(names), head.bias) for weight in head.weight.chunk(len(names), -1)]
    for name, (weight, bias) in zip(names, parts, strict=True):
        weights |= {f"{name}.weight": weight, f"{name}.bias": bias.clone()}
    save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, path)


def load_target(target: TargetModel, path: str | Path) -> TargetModel:
    """A model like `target`, with the weights of backbone and head that `save_target` wrote.

    Raises:
        InputError: if there is no file, or it belongs to another model or another number of classes.
    """
    if not Path(path).is_file():
        raise InputError(f"no model at {path}: train one with train.py, or give another path")
    model = copy.deepcopy(target.backbone)
    model.reset_classifier(target.num_classes)
    try:
        load_checkpoint(model, str(path))
    except RuntimeError as error:
        raise InputError(
            f"expected weights of {target.name} for {target.num_classes} classes in {path}, got others: "
            f"{str(error).splitlines()[-1].strip()}"
        ) from error
    return TargetModel(model).eval()
