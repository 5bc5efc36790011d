"""Any model as a model to explain: timm's as they are, others converted to timm's architecture."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from explainers.conversion.settings import Statistics, with_settings
from explainers.errors import InputError
from explainers.target import TargetModel
from explainers.target.fetching import timm_model


def as_target(
    model: Any,
    weights: Any = None,
    *,
    mean: Statistics = None,
    std: Statistics = None,
    image_size: int | None = None,
    classes: Sequence[str] = (),
) -> TargetModel:
    """Make any model a model to explain. The caller's model stays as it is.

    Args:
        model: the name of a timm model, a timm module, or a `TargetModel`, which is returned as it is.
        weights: file of the weights of a timm name.
        mean: mean of normalised pixels from 0 to 1, one for all channels or one for each; `None` takes the model's own.
        std: their standard deviation, likewise.
        image_size: height and width of the images in pixels; `None` takes the model's own.
        classes: names of the classes, in the order of the logits; empty if they are not known.

    Raises:
        InputError: if the model cannot be converted, or an argument does not fit it.
    """
    if isinstance(model, TargetModel):
        if weights is None and mean is None and std is None and image_size is None and not classes:
            return model
        raise InputError("expected a TargetModel alone, which has its own settings, got further arguments: drop them")
    if isinstance(model, str):
        return with_settings(TargetModel(timm_model(model, weights)).eval(), mean, std, image_size, classes)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a model, or the name of a timm model, got {type(model).__name__}: give a torch.nn.Module, a name"
            " such as vit_tiny_patch16_224, or a TargetModel"
        )
    if weights is not None:
        raise InputError("expected weights for the name of a timm model, got a module: load its weights before")
    return with_settings(TargetModel(model).eval(), mean, std, image_size, classes)
