"""Any model as a model to explain: timm's as they are, others converted to timm's architecture."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import explainers.models.huggingface as huggingface
from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.models.fetching import timm_model
from explainers.models.inside import find_backbones, find_library, is_of_timm, read_inputs, take_apart
from explainers.models.mapping import Inputs, Plan, Statistics, Unmapped, channels, check_image_size, map_to_timm
from explainers.models.model import TargetModel
from explainers.models.names import list_names, read_names
from explainers.models.plain import check_stated, plain_target
from explainers.models.preprocessing import read_processor
from explainers.models.wrappers import take_off_wrappers
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
    classes: Sequence[str] | str | Path = (),
    processor: Any = None,
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
        classes: names of the classes, in the order of the logits, or a file of them, see `read_names`; empty for those
            that the model names.
        processor: what prepared the photos of its training: an image processor of transformers, or torchvision's
            `weights.transforms()`; mean, std and image_size follow from it. `None` takes that of timm's config, of the
            entry `weights`, or the usual one of the family.

    Raises:
        InputError: if the model cannot be explained, or an argument does not fit it.
    """
    if isinstance(model, TargetModel):
        if not classes and all(each is None for each in (weights, mean, std, image_size, processor)):
            return model
        raise InputError("expected a TargetModel alone, which has its own settings, got further arguments: drop them")
    transform = None
    if processor is not None:
        found = read_processor(processor)
        transform, image_size = found.transform, image_size or found.transform.size[0]
        mean, std = found.mean if mean is None else mean, found.std if std is None else std
    if image_size is not None:
        check_image_size(image_size)
    if isinstance(classes, str | Path):
        classes = read_names(classes)
    if isinstance(model, str):
        model, weights = timm_model(model, weights), None
    elif not isinstance(model, nn.Module):
        raise InputError(
            f"expected a model, or the name of a timm model, got {type(model).__name__}: give a torch.nn.Module, a name"
            " such as vit_tiny_patch16_224, or a TargetModel"
        )
    model = take_off_wrappers(model)
    library = find_library(model)
    if library is not None and not hasattr(model, "timm_model"):
        inputs = library.find_inputs(model, weights, image_size).override(mean, std, classes, transform)
        return _convert(model, library.plan, inputs)
    if weights is not None:
        raise InputError("expected weights for the name of a timm model, got a module: load its weights before")
    if library is not None:
        inputs = huggingface.find_wrapped_inputs(model).override(mean, std, classes, transform)
        model, mean, std, classes = model.timm_model, inputs.mean, inputs.std, inputs.classes
        transform = inputs.transform
    if is_of_timm(model):
        stated = read_inputs(model).override(mean, std, ())
        check_stated(model, mean=stated.mean, std=stated.std)
        return _override_settings(TargetModel(model).float().eval(), mean, std, image_size, classes, transform)
    inputs = Inputs(image_size, None, None, "as given", transform=transform)
    return _search(model, inputs.override(mean, std, classes))


def _convert(model: nn.Module, plan: Callable[[nn.Module, Inputs], Plan], inputs: Inputs) -> TargetModel:
    """Convert a model of another library to timm's architecture, or what is inside of it, and say which in one line."""
    try:
        target, difference = map_to_timm(model, plan(model, inputs))
    except Unmapped as reason:
        return _search(model, inputs, str(reason))
    became = f"is computed in timm's architecture, with outputs that differ by at most {difference:.0g}"
    print(f"{type(model).__name__} {became}; {inputs}", file=sys.stderr, flush=True)
    return target


def _search(model: nn.Module, inputs: Inputs, reason: str = "") -> TargetModel:
    """Make a target of the largest known backbone inside of a module, or of the module as it is; a line says which."""
    name, backbones = type(model).__name__, find_backbones(model)
    reasons = [reason] if reason else []
    for inside in backbones:
        try:
            target, said = take_apart(model, inside, inputs.mean, inputs.std, inputs.image_size)
        except Unmapped as error:
            reasons.append(
                f"{inside} inside ({type(model.get_submodule(inside)).__name__}) is not followed by a head: {error}"
            )
            continue
        print(f"{name}: {said}", file=sys.stderr, flush=True)
        return _override_settings(target, None, None, None, inputs.classes, inputs.transform)
    if backbones:
        own = read_inputs(model.get_submodule(backbones[0]), inputs.image_size)
        inputs = own.override(inputs.mean, inputs.std, inputs.classes, inputs.transform)
    if reasons:
        by_hand = "; if you know its head, give TargetModel(backbone, head=head)" if backbones else ""
        print(
            f"{name} stays as it is, because {'; '.join(reasons)}: it has methods that mask images or take gradients of"
            f" pixels and feature maps, and all metrics, but no methods of transformers{by_hand}; {inputs}",
            file=sys.stderr,
            flush=True,
        )
    return plain_target(model, inputs.mean, inputs.std, inputs.image_size, inputs.classes, inputs.transform)


def _override_settings(
    target: TargetModel,
    mean: Statistics,
    std: Statistics,
    image_size: int | None,
    classes: Sequence[str],
    transform: ImageTransform | None,
) -> TargetModel:
    """Give a target, which is changed in place, other settings than its own; see `as_target`."""
    config = dict(target.backbone.pretrained_cfg)  # a copy; timm reads the settings of a model from it
    for name, given in (("mean", mean), ("std", std)):
        if given is not None:
            values = channels(name, given, len(getattr(target, name)))
            config[name] = tuple(values)
            getattr(target, name).copy_(torch.tensor(values)[:, None, None])
    if transform is not None:
        config["transform"] = transform
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
