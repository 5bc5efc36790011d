"""Vision transformers of Hugging Face transformers as models of timm.

Nothing here imports transformers: a model that is handed in brings what is read.
"""

import inspect
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explainers.conversion.huggingface_families import FAMILIES
from explainers.conversion.mapping import Plan, Unmapped, linear_part
from explainers.conversion.names import Weights
from explainers.conversion.settings import Inputs
from explainers.errors import InputError
from explainers.target.heads import DistilledHead

FIRST_TOKEN = ("vit", "deit")
"""Families whose own pooled output is another than the embedding that their heads read: the class token."""


def plan(model: Any, inputs: Inputs) -> Plan:
    """Plan how a model of transformers becomes a model of timm.

    Args:
        model: the model, with or without a classification layer.
        inputs: the images that it takes. For another size than the model's own, positions are interpolated as the model
            itself does it.

    Raises:
        Unmapped: if timm has no such architecture.
    """
    family, name = family_of(model), type(model).__name__
    if family not in FAMILIES or "MaskedImageModeling" in name or name.endswith("Backbone"):
        raise Unmapped(f"only models of {', '.join(FAMILIES)} of transformers that classify or embed are converted")
    config = getattr(model.config, "vision_config", model.config)
    own, size = own_size(config), inputs.image_size
    if own is None or size is None or config.num_channels != 3:
        raise Unmapped("its images are not square, or not of three channels")
    weights = model.state_dict() if size == own else _resized(model, size, config.patch_size)
    try:
        architecture, arguments, named = FAMILIES[family][0](model, config, weights, size)
    except (AttributeError, KeyError) as error:
        raise Unmapped(f"it is not built as the {family} of transformers that is known here ({error})") from error
    outputs = partial(_outputs, family=family, interpolates=size != own)
    return Plan(_name(model), architecture, arguments, named, _head(model), outputs, inputs)


def inputs_of(model: Any, weights: Any = None, image_size: int | None = None) -> Inputs:
    """Return the images that a model of transformers takes, as far as its family says it.

    Args:
        model: the model.
        weights: refused; the model has its own.
        image_size: side of the images in pixels; None takes that of the config.

    Raises:
        InputError: for weights, or for a model that embeds texts too.
    """
    family = family_of(model)
    if weights is not None:
        raise InputError("expected weights for the name of a timm model, got a model of transformers: drop weights")
    if hasattr(model, "vision_model") and hasattr(model, "text_model"):
        raise InputError(
            f"expected a model of images, got {type(model).__name__}, which embeds texts too: give model.vision_model"
        )
    mean, std = FAMILIES[family][1] if family in FAMILIES else (None, None)
    size = image_size or own_size(getattr(model.config, "vision_config", model.config))
    classifies = hasattr(model, "classifier") or hasattr(model, "cls_classifier")
    classes = class_names(model.config) if classifies else []
    return Inputs(size, mean, std, f"those of the usual image processor of {family}", classes)


def inputs_of_wrapped(model: Any) -> Inputs:
    """Return the images that a timm model inside a model of transformers takes, as its config states them."""
    stated = model.config.pretrained_cfg or {}
    classes = class_names(model.config) if type(model).__name__.endswith("ForImageClassification") else []
    return Inputs(None, stated.get("mean"), stated.get("std"), "those of its config", classes)


def _name(model: Any) -> str:
    """Return the last part of a model's name on the Hub, or the name of its class."""
    path = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return str(path).rstrip("/").rpartition("/")[2]


def family_of(model: Any) -> str:
    """Return the folder in transformers that a model's class is from, such as `vit`."""
    parts = type(model).__module__.split(".")
    return parts[2] if len(parts) > 2 else ""


def own_size(config: Any) -> int | None:
    """Return the side of a model's images in pixels; None if it is not known, or if they are not square."""
    size = getattr(config, "image_size", None)
    sizes = set(size) if isinstance(size, Sequence) else {size}
    return sizes.pop() if len(sizes) == 1 else None


def class_names(config: Any) -> list[str]:
    """Return the names of the classes, or none if transformers made them up: LABEL_0, LABEL_1 ..."""
    names = {int(index): str(name) for index, name in config.id2label.items()}
    made_up = all(name == f"LABEL_{index}" for index, name in names.items())
    return [] if made_up or sorted(names) != list(range(len(names))) else [names[index] for index in range(len(names))]


def _head(model: Any) -> nn.Module | None:
    """Return the layer from embeddings to outputs; None for a model that embeds."""
    if hasattr(model, "distillation_classifier"):
        return DistilledHead(model.cls_classifier, model.distillation_classifier)
    if hasattr(model, "visual_projection"):  # with a bias of zeros, as in timm's CLIP
        layer = model.visual_projection
        head = nn.Linear(layer.in_features, layer.out_features)
        head.load_state_dict({"weight": layer.weight.detach(), "bias": torch.zeros(layer.out_features)})
        return head
    return linear_part(model.classifier) if hasattr(model, "classifier") else None


def _resized(model: Any, image_size: int, patch_size: int) -> Weights:
    """Return the weights of a model whose positions (1, T, D) or (T, D) it interpolates for images of another size."""
    weights: Weights = model.state_dict()
    name = next((name for name in weights if re.search(r"position_embeddings?(\.weight)?$", name)), None)
    if name is None:
        return weights
    part = next((part for part in model.modules() if hasattr(part, "interpolate_pos_encoding")), None)
    if part is None:
        raise Unmapped("it cannot interpolate its positions")
    own = own_size(getattr(model.config, "vision_config", model.config)) or 0
    prefix = weights[name].shape[-2] - (own // patch_size) ** 2
    tokens = weights[name].new_zeros(1, prefix + (image_size // patch_size) ** 2, weights[name].shape[-1])
    with torch.no_grad():
        positions = part.interpolate_pos_encoding(tokens, image_size, image_size)
    return {**weights, name: positions.reshape(*weights[name].shape[:-2], *positions.shape[-2:])}


def _outputs(model: Any, images: Tensor, family: str, interpolates: bool) -> Tensor:
    """Compute logits (B, K) of normalised images, or embeddings (B, D) if the model has no head."""
    accepts = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    outputs = model(pixel_values=images, **({"interpolate_pos_encoding": True} if interpolates and accepts else {}))
    for name in ("logits", "image_embeds"):
        if getattr(outputs, name, None) is not None:
            found: Tensor = getattr(outputs, name)
            return found
    pooled: Tensor | None = outputs.last_hidden_state[:, 0] if family in FIRST_TOKEN else outputs.pooler_output
    if pooled is None:
        raise Unmapped("it was built without pooling, and therefore has no embedding")
    return pooled
