"""Any model as a model to explain: timm's as they are, others converted to timm's architecture."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm.data
import torch
from torch import nn

import explainers.models.huggingface as huggingface
import explainers.models.torchvision_models as torchvision_models
from explainers.errors import InputError
from explainers.models.fetching import timm_model
from explainers.models.mapping import Inputs, Plan, Statistics, Unmapped, channels, check_image_size, map_to_timm
from explainers.models.model import TargetModel
from explainers.models.names import list_names
from explainers.models.outputs import OutputReader, TargetFunction
from explainers.models.plain import plain_target
from explainers.models.scores import Score
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
    score: Score | None = None,
    target: TargetFunction | None = None,
) -> TargetModel:
    """Make any model a model to explain. The caller's model stays as it is.

    Models of torchvision and Hugging Face transformers are computed in timm's architecture where that gives the same
    outputs, which is checked. One line on stderr says what became of such a model, and its normalisation.

    Args:
        model: the name of a timm model, a timm module, a `TargetModel`, which is returned as it is, a model of
            torchvision or transformers, or any module that maps normalised images (B, 3, S, S) to logits (B, K).
            Further inputs of a module are fixed by `functools.partial(module, name=...)`.
        weights: file of the weights of a timm name; or the entry of torchvision's enumeration with which a model of
            torchvision was built, such as `ResNet50_Weights.DEFAULT`, which states normalisation and class names.
        mean: mean of normalised pixels from 0 to 1, one for all channels or one for each; `None` takes the model's own,
            for torchvision that of ImageNet, for transformers that of the family's usual image processor.
        std: their standard deviation, likewise.
        image_size: height and width of the images in pixels; `None` takes the model's own, 224 for CNNs of torchvision.
        classes: names of the classes, in the order of the logits; empty for those that the model names.
        score: what the logits mean, `softmax`, `sigmoid` or `value`, see `TargetModel`; `None` takes what the config
            of transformers says, else `softmax`.
        target: function of what the module returns for B images → the number of each image that is explained, (B,),
            such as `lambda output: output["out"][:, 3, 40:80, 60:90].mean((1, 2))` of a segmentation.

    Raises:
        InputError: if the model cannot be explained, or an argument does not fit it.
    """
    if isinstance(model, TargetModel):
        if all(given is None for given in (weights, mean, std, image_size, score, target)) and not classes:
            return model
        raise InputError("expected a TargetModel alone, which has its own settings, got further arguments: drop them")
    if image_size is not None:
        check_image_size(image_size)
    if isinstance(model, str):
        model, weights = timm_model(model, weights), None
    if target is not None or isinstance(model, partial) and isinstance(model.func, nn.Module):
        return _read_output(model, weights, target, (mean, std, image_size, classes, score))
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a model, or the name of a timm model, got {type(model).__name__}: give a torch.nn.Module, a name"
            " such as vit_tiny_patch16_224, or a TargetModel"
        )
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    library = type(model).__module__.partition(".")[0]
    if library in LIBRARIES and not hasattr(model, "timm_model"):
        inputs = LIBRARIES[library].find_inputs(model, weights, image_size).override(mean, std, classes, score)
        return _convert(model, LIBRARIES[library].plan, inputs)
    if weights is not None:
        raise InputError("expected weights for the name of a timm model, got a module: load its weights before")
    if library == "transformers":
        inputs = huggingface.find_wrapped_inputs(model).override(mean, std, classes, score)
        model, mean, std, classes = model.timm_model, inputs.mean, inputs.std, inputs.classes
        score = inputs.score
    if hasattr(model, "reset_classifier"):
        return _override_settings(TargetModel(model, score=score).float().eval(), mean, std, image_size, classes)
    return plain_target(model, mean, std, image_size, classes, score)


LIBRARIES: dict[str, Any] = {"torchvision": torchvision_models, "transformers": huggingface}
"""Name of a library → module that tells which images a model of it takes, and plans its conversion."""


def _convert(model: nn.Module, plan: Callable[[nn.Module, Inputs], Plan], inputs: Inputs) -> TargetModel:
    """Convert a model of another library to timm's architecture, or take it as it is, and say which in one line."""
    target = None
    try:
        target, difference = map_to_timm(model, plan(model, inputs))
        became = f"is computed in timm's architecture, with outputs that differ by at most {difference:.0g}"
    except Unmapped as reason:
        became = (
            f"stays as it is, because {reason}: it has methods that mask images or take gradients of pixels"
            " and feature maps, and all metrics, but no methods of transformers"
        )
    print(f"{type(model).__name__} {became}; {inputs}", file=sys.stderr, flush=True)
    return target or plain_target(model, inputs.mean, inputs.std, inputs.image_size, inputs.classes, inputs.score)


def _read_output(model: Any, weights: Any, function: TargetFunction | None, settings: tuple[Any, ...]) -> TargetModel:
    """Explain what a function reads of a module's output, or the output of one whose further inputs are fixed."""
    mean, std, image_size, classes, score = settings
    module = model.func if isinstance(model, partial) else model
    library = type(module).__module__.partition(".")[0]
    if library in LIBRARIES:
        inputs = LIBRARIES[library].find_inputs(module, weights, image_size)
    elif hasattr(module, "reset_classifier"):
        own = timm.data.resolve_model_data_config(module)
        inputs = Inputs(image_size or own["input_size"][-1], own["mean"], own["std"], "those of its config")
    else:
        inputs = Inputs(image_size, None, None, "")
    inputs = inputs.override(mean, std, classes, score if function is None else "value")
    print(f"{type(module).__name__} stays as it is; {inputs}", file=sys.stderr, flush=True)
    reader = OutputReader(model, function)
    return plain_target(reader, inputs.mean, inputs.std, inputs.image_size, inputs.classes, inputs.score)


def _override_settings(
    target: TargetModel, mean: Statistics, std: Statistics, image_size: int | None, classes: Sequence[str]
) -> TargetModel:
    """Give a target, which is changed in place, other settings than its own; see `as_target`."""
    config = dict(target.backbone.pretrained_cfg)  # a copy; timm reads the settings of a model from it
    for name, given in (("mean", mean), ("std", std)):
        if given is not None:
            values = channels(name, given, len(getattr(target, name)))
            config[name] = tuple(values)
            getattr(target, name).copy_(torch.tensor(values)[:, None, None])
    target.backbone.pretrained_cfg = config
    if image_size is not None:
        _resize(target, image_size)
    if classes:
        target.classes = list_names(classes, target.num_classes)
    return target


def _resize(target: TargetModel, image_size: int) -> None:
    """Change the size of the images that a target takes; a transformer interpolates its positions."""
    backbone = target.backbone
    try:
        if hasattr(backbone, "set_input_size"):
            backbone.set_input_size(img_size=(image_size, image_size))
        backbone.pretrained_cfg["input_size"] = (len(target.mean), image_size, image_size)
        target.check_grid(target.grid)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"expected image_size that {target.name} can take, got {image_size}: {reason}") from error
