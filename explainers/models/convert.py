"""Any model as a model to explain: timm's as they are, others converted to timm's architecture."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

import explainers.models.huggingface as huggingface
import explainers.models.torchvision_models as torchvision_models
from explainers.errors import InputError
from explainers.models.fetching import timm_model
from explainers.models.mapping import Plan, Unmapped, map_to_timm
from explainers.models.model import TargetModel
from explainers.models.plain import plain_target
from explainers.models.settings import Inputs, Statistics, check_image_size, override_settings
from explainers.runtime.modes import keep_random_state, ordinary_tensors


@keep_random_state()
@ordinary_tensors()
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

    Models of torchvision and Hugging Face transformers are computed in timm's architecture where that gives the same
    outputs, which is checked. One line on stderr says what became of such a model, and its normalisation.

    Args:
        model: the name of a timm model, a timm module, a `TargetModel`, which is returned as it is, a model of
            torchvision or transformers, or any module that maps normalised images (B, 3, S, S) to logits (B, K).
        weights: file of the weights of a timm name; or the entry of torchvision's enumeration with which a model of
            torchvision was built, such as `ResNet50_Weights.DEFAULT`, which states normalisation and class names.
        mean: mean of normalised pixels from 0 to 1, one for all channels or one for each; `None` takes the model's own,
            for torchvision that of ImageNet, for transformers that of the family's usual image processor.
        std: their standard deviation, likewise.
        image_size: height and width of the images in pixels; `None` takes the model's own, 224 for CNNs of torchvision.
        classes: names of the classes, in the order of the logits; empty for those that the model names.

    Raises:
        InputError: if the model cannot be explained, or an argument does not fit it.
    """
    if isinstance(model, TargetModel):
        if weights is None and mean is None and std is None and image_size is None and not classes:
            return model
        raise InputError("expected a TargetModel alone, which has its own settings, got further arguments: drop them")
    if image_size is not None:
        check_image_size(image_size)
    if isinstance(model, str):
        return override_settings(TargetModel(timm_model(model, weights)).float().eval(), mean, std, image_size, classes)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a model, or the name of a timm model, got {type(model).__name__}: give a torch.nn.Module, a name"
            " such as vit_tiny_patch16_224, or a TargetModel"
        )
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    library = type(model).__module__.partition(".")[0]
    if library in LIBRARIES and not hasattr(model, "timm_model"):
        return _convert(model, *LIBRARIES[library], weights, mean, std, image_size, classes)
    if weights is not None:
        raise InputError("expected weights for the name of a timm model, got a module: load its weights before")
    if library == "transformers":
        inputs = huggingface.inputs_of_wrapped(model).override(mean, std, classes)
        inner = TargetModel(model.timm_model).float().eval()
        return override_settings(inner, inputs.mean, inputs.std, image_size, inputs.classes)
    if hasattr(model, "reset_classifier"):
        return override_settings(TargetModel(model).float().eval(), mean, std, image_size, classes)
    return plain_target(model, mean, std, image_size, classes)


LIBRARIES = {
    "torchvision": (torchvision_models.inputs_of, torchvision_models.plan),
    "transformers": (huggingface.inputs_of, huggingface.plan),
}
"""Name of a library → functions that return the images that a model of it takes, and plan its conversion."""


def _convert(
    model: nn.Module,
    inputs_of: Callable[..., Inputs],
    plan: Callable[[nn.Module, Inputs], Plan],
    weights: Any,
    mean: Statistics,
    std: Statistics,
    image_size: int | None,
    classes: Sequence[str],
) -> TargetModel:
    """Convert a model of another library to timm's architecture, or take it as it is, and say which in one line."""
    name, inputs = type(model).__name__, inputs_of(model, weights, image_size).override(mean, std, classes)
    try:
        planned = plan(model, inputs)
        target, difference = map_to_timm(model, planned)
    except Unmapped as reason:
        _say(
            f"{name} stays as it is, because {reason}: it has methods that mask images or take gradients of pixels"
            f" and feature maps, and all metrics, but no methods of transformers; {inputs}"
        )
        return plain_target(model, inputs.mean, inputs.std, inputs.image_size, inputs.classes)
    _say(f"{name} is computed in timm's architecture, with outputs that differ by at most {difference:.0g}; {inputs}")
    return target


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
