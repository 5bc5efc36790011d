"""Saves and loads target models: backbone and head in one checkpoint that timm can load."""

import copy
from pathlib import Path
from typing import Any

from timm.models import load_checkpoint

from explainers.errors import InputError
from explainers.saved.weights import save_weights
from explainers.target import TargetModel
from explainers.target.heads import DistilledHead


def save_target(target: TargetModel, path: Path) -> None:
    """Write backbone and head to one safetensors file, which timm can load as a checkpoint of the original model.

    Args:
        target: the model, with a linear head or a `DistilledHead`.
        path: the file to write.
    """
    weights, head = target.backbone.state_dict(), target.head
    layers = target.backbone.pretrained_cfg["classifier"]
    layers = (layers,) if isinstance(layers, str) else layers
    if isinstance(head, DistilledHead):
        parts: list[Any] = [(part.weight, part.bias) for part in (head.head, head.head_dist)]
    else:  # a factor of 2 for a distilled DeiT, because timm averages the logits of its two classifiers
        parts = [(weight * len(layers), head.bias) for weight in head.weight.chunk(len(layers), -1)]
    for layer, (weight, bias) in zip(layers, parts, strict=True):
        weights |= {f"{layer}.weight": weight, f"{layer}.bias": bias.clone()}
    save_weights(weights, path)


def load_target(target: TargetModel, path: str | Path) -> TargetModel:
    """Load the backbone and head that `save_target` wrote.

    Args:
        target: a model of the same architecture and number of classes; it is not changed.
        path: the file to read.

    Returns:
        A new model, in eval mode.

    Raises:
        InputError: if the file does not exist, or holds another model or another number of classes.
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
