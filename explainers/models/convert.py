"""Any model as a model to explain: timm's as they are, others converted to timm's architecture."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.nn.modules import module as modules

from explainers.errors import InputError, check_keywords
from explainers.images.bands import PixelFormat
from explainers.images.decoding import White
from explainers.images.transform import ImageTransform
from explainers.masking import ImageSize, read_size
from explainers.models.clip_models import clip_target, find_inputs, find_tower, is_clip
from explainers.models.fetching import timm_model
from explainers.models.heads import Inseparable
from explainers.models.inside import find_backbones, find_library, is_of_timm, read_inputs, set_size, take_apart
from explainers.models.mapping import (
    Inputs,
    Plan,
    Statistics,
    channels,
    check_stated,
    map_to_timm,
    state_statistics,
)
from explainers.models.model import TargetModel
from explainers.models.names import list_names, read_names
from explainers.models.outputs import OutputReader, TargetFunction
from explainers.models.plain import plain_target
from explainers.models.preprocessing import read_processor
from explainers.models.probes import TOLERANCE, Origin, Unmapped, compare_outputs, count_channels, draw_probes
from explainers.models.scores import Score
from explainers.models.wrappers import take_off_wrappers
from explainers.runtime.modes import keep_random_state, ordinary_tensors
from explainers.saved.identity import is_added


class ImageSettings(TypedDict, total=False):
    """Keyword arguments of `as_target` about the images that a model takes."""

    image_size: ImageSize | None
    mean: Statistics
    std: Statistics
    processor: Any
    white: White
    bands: Sequence[int] | None


FIXED = ("weights", "mean", "std", "processor", "target", "whole")
"""Arguments of `as_target` that a `TargetModel` has settled."""


@keep_random_state()
@ordinary_tensors()
def as_target(
    model: Any,
    weights: Any = None,
    *,
    head: nn.Module | str | Path | None = None,
    classes: Sequence[str] | str | Path = (),
    score: Score | None = None,
    target: TargetFunction | None = None,
    whole: bool = False,
    device: str | torch.device | None = None,
    **images: Unpack[ImageSettings],
) -> TargetModel:
    """Make any model a model to explain, with all that belongs to it. The caller's model stays as it is.

    Models of torchvision and Hugging Face transformers are computed in timm's architecture where that gives the same
    outputs, which is checked. One line on stderr says what became of such a model, and its normalisation.

    Args:
        model: the name of a timm model, a timm module, a model of torchvision or transformers, or any module that maps
            normalised images (B, C, H, W) to logits (B, K). Further inputs are fixed by
            `functools.partial(module, name=...)`. A `TargetModel` is returned as it is, or as a copy with other
            settings.
        weights: file of the weights of a timm name; or the entry of torchvision's enumeration with which a model of
            torchvision was built, such as `ResNet50_Weights.DEFAULT`, which states normalisation and class names.
        head: a head of another task on the same backbone, or its file; `None` for the model's own.
        classes: names of the classes, in the order of the logits, or a file of them, see `read_names`; empty for those
            that the model names.
        score: what the logits mean, `softmax`, `sigmoid` or `value`, see `TargetModel`; `None` takes `value` for a
            `target`, else what the config of transformers says, else `softmax`.
        target: function of what the module returns for B images → the number of each image that is explained, (B,),
            such as `lambda output: output["out"][:, 3, 40:80, 60:90].mean((1, 2))` of a segmentation.
        whole: explain the module as it is, without methods of transformers, where its parts might compute something
            else.
        device: where the model computes; `None` for where it is.
        image_size: height and width of the images in pixels, or one number for both: more pixels give more patches. A
            transformer interpolates its positions. `None` takes the model's own, 224 for CNNs of torchvision.
        mean: mean of normalised pixels from 0 to 1, one for all channels or one for each; `None` takes the model's own,
            for torchvision that of ImageNet, for transformers that of the family's usual image processor.
        std: their standard deviation, likewise.
        processor: the image processor of transformers, or torchvision's `weights.transforms()`, that prepared the
            photos of the training; mean, std and image_size follow from it. `None` takes that of timm's config, of the
            entry `weights`, or the usual one of the family.
        white: value of white in floats and images of more than 8 bits, such as 4095; or (black, white).
        bands: three of 4 channels or more, numbered from 0, that pictures show; `None` for the first.

    Raises:
        InputError: if the model cannot be explained, or an argument does not fit it.
    """
    check_keywords("as_target", images, ImageSettings)
    fixed: dict[str, Any] = {}
    if isinstance(model, partial):
        if model.args:
            raise InputError("expected further inputs by name, as in functools.partial(model, name=...), got no names")
        model, fixed = model.func, model.keywords
    if isinstance(model, nn.Module):
        model = take_off_wrappers(model)
    names = read_names(classes) if isinstance(classes, str | Path) else classes
    given_size = images.get("image_size")
    size = None if given_size is None else read_size(given_size)
    if isinstance(model, TargetModel):
        found, settled = model, {"weights": weights, "target": target, "whole": whole or None, **images}
        if given := [f"{name}=" for name in FIXED if settled.get(name) is not None] or [*fixed]:
            raise InputError(f"{', '.join(given)}: a TargetModel was made with its own: give the model it was made of")
    else:
        if isinstance(model, str):
            model, weights = timm_model(model, weights), None
        _check_module(model, weights, target)
        inputs = replace(_state_inputs(model, size, images), classes=() if head is not None else names, score=score)
        if target is None and not fixed and not whole:
            found = _settle_hooks(_find_target(model, weights, inputs))
        else:
            found = _settle_hooks(_read_output(model, weights, target, fixed, inputs))
        # Settled by `inputs`: what is left is for another head
        size, names, score = None, () if head is None else names, None if head is None else score
    white, bands = images.get("white"), images.get("bands")
    seen = white is not None or bands is not None
    if head is not None or score is not None:
        found = TargetModel(found, head, score).eval()
    elif found is model and any((size, names, device, seen)):
        found = found.copied()
    found = _override_settings(found, size, names, None)
    if seen:
        found.pixels = PixelFormat(found.channels, white, bands and tuple(bands))
    return found if device is None else move(found, device)


def move(target: TargetModel, device: str | torch.device) -> TargetModel:
    """Move a target, in place; an InputError for a device that this machine does not have."""
    try:
        return target.to(device)
    except (RuntimeError, AssertionError) as error:  # an unknown device, or none of its kind
        reason = str(error).partition("\n")[0][:80]
        raise InputError(f"device={device}: expected one such as cpu or cuda: {reason}", "device") from error


def _state_inputs(model: nn.Module, size: tuple[int, int] | None, images: ImageSettings) -> Inputs:
    """Say what the arguments of `as_target` state about the images of a module."""
    mean, std, transform = images.get("mean"), images.get("std"), None
    if (processor := images.get("processor")) is not None:
        found = read_processor(processor)
        mean, std = found.mean if mean is None else mean, found.std if std is None else std
        size = size or found.transform.size
        transform = replace(found.transform, size=size)
    count = count_channels(model)
    if find_library(model) is None and not is_of_timm(model) and not is_clip(model):
        # The mean of a module of no library may be of images that its first convolution does not see
        count = next((len(each) for each in (mean, std) if isinstance(each, Sequence)), count)
    return Inputs(size, channels("mean", mean, count), channels("std", std, count), "as given", (), transform)


def _check_module(model: Any, weights: Any, function: TargetFunction | None) -> None:
    """Raise an InputError for no module, one without values, one with hooks of all modules, and arguments beside it."""
    if function is not None and not callable(function):
        raise InputError(
            f"target= needs a function of what the module returns, got {function!r}: give one, such as lambda output:"
            " output[:, 3]"
        )
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a model, or the name of a timm model, got {type(model).__name__}: give a torch.nn.Module, such"
            " as program.module() of an exported one, a name such as vit_tiny_patch16_224, or a TargetModel"
        )
    if any(map(is_added, [*modules._global_forward_hooks.values(), *modules._global_forward_pre_hooks.values()])):
        raise InputError("model= needs hooks of its own, got such of all modules: remove them")
    if any(weight.is_meta for weight in (*model.parameters(), *model.buffers())):
        raise InputError(
            f"expected {type(model).__name__} with weights, got one on the meta device: load its weights first"
        )
    if weights is not None and (find_library(model) is None or hasattr(model, "timm_model")):
        raise InputError("expected weights for the name of a timm model, got a module: load its weights before")


def _find_target(model: Any, weights: Any, given: Inputs) -> TargetModel:
    """Make a target of a module without wrappers, as its library and its parts allow."""
    library = find_library(model)
    if library is not None and not hasattr(model, "timm_model"):
        return _convert(model, library.plan, library.find_inputs(model, weights, given.size).override(given))
    if is_clip(model):
        tower = find_tower(model)
        inputs = find_inputs(tower, given.size).override(replace(given, classes=()))
        found, became = clip_target(tower, inputs)
        print(f"the image tower {type(tower).__name__} {became}; {inputs}", file=sys.stderr, flush=True)
        return _override_settings(found, given.size, given.classes, inputs.transform)
    if library is not None:
        given = replace(library.find_inputs(model, None, given.size).override(given), size=given.size)
        model = model.timm_model
    if is_of_timm(model):
        return _take_timm(model, given)
    return _search(model, given)


@torch.no_grad()
def _settle_hooks(target: TargetModel) -> TargetModel:
    """Take the caller's hooks off a target if they change no outputs, otherwise leave all; a line says which."""
    tables: list[Any] = []
    for part in target.modules():
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()
        tables += [part._forward_hooks, part._forward_pre_hooks]
    tables = [hooks for hooks in tables if any(map(is_added, hooks.values()))]
    before = [dict(hooks) for hooks in tables]
    if not tables:
        return target
    images = draw_probes(target.channels, target.grid.size, target.mean)
    expected, became = target.outputs(images), "change no outputs of probe images; they are left out"
    for hooks in tables:
        for key in [key for key, hook in hooks.items() if is_added(hook)]:
            del hooks[key]
    try:
        changed = not compare_outputs(target.outputs(images), expected) < TOLERANCE
    except Exception:  # what follows needs what a hook returns
        changed = True
    if changed:
        became = "change its outputs; they stay, and run on every pass"
        for hooks, own in zip(tables, before, strict=True):
            hooks.clear()
            hooks.update(own)
    print(f"{target.name}: its hooks {became}", file=sys.stderr, flush=True)
    return target


def _take_timm(model: Any, given: Inputs) -> TargetModel:
    """Make a target of a model of timm, by its parts if their outputs are its own."""
    inputs = read_inputs(model).override(given)
    check_stated(model, mean=inputs.mean, std=inputs.std)
    whole = state_statistics(model, given)
    try:
        found = TargetModel(whole, score=given.score).eval()
    except Inseparable as error:
        inputs = replace(inputs, size=given.size or inputs.size)
        set_size(whole, given.size)
        found = _search(whole, inputs, error.reason)
        names = {key: value for key, value in whole.pretrained_cfg.items() if key in ("num_classes", "label_names")}
        found.backbone.pretrained_cfg = found.backbone.pretrained_cfg | names
        return found
    found = _override_settings(found, given.size, given.classes, given.transform)
    set_size(whole, given.size)
    found.origin = Origin(found, whole)
    return found


def _convert(model: nn.Module, plan: Callable[[nn.Module, Inputs], Plan], inputs: Inputs) -> TargetModel:
    """Convert a model of another library, or a backbone inside of it, to timm's architecture; one line says which."""
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
            target, said = take_apart(model, inside, inputs)
        except Unmapped as error:
            reasons.append(
                f"{inside} inside ({type(model.get_submodule(inside)).__name__}) is not followed by a head: {error}"
            )
            continue
        print(f"{name}: {said}", file=sys.stderr, flush=True)
        return _override_settings(target, None, inputs.classes, inputs.transform)
    if backbones:
        inputs = read_inputs(model.get_submodule(backbones[0]), inputs.size).override(inputs)
    if reasons:
        by_hand = "; if you know its head, give TargetModel(backbone, head=head)" if backbones else ""
        print(
            f"{name} stays as it is, because {'; '.join(reasons)}: it has methods that mask images or take gradients of"
            f" pixels and feature maps, and all metrics, but no methods of transformers{by_hand}; {inputs}",
            file=sys.stderr,
            flush=True,
        )
    return plain_target(model, inputs)


def _read_output(
    module: Any, weights: Any, function: TargetFunction | None, fixed: dict[str, Any], given: Inputs
) -> TargetModel:
    """Explain what a function reads of a module's output, or the output of one whose further inputs are fixed."""
    library = find_library(module)
    if library is not None:
        inputs = library.find_inputs(module, weights, given.size).override(given)
    else:
        inputs = read_inputs(module, given.size).override(given) if is_of_timm(module) else given
    if function is not None:
        inputs = replace(inputs, score=given.score or "value")
    print(f"{type(module).__name__} stays as it is; {inputs}", file=sys.stderr, flush=True)
    return plain_target(OutputReader(module, function, fixed), inputs)


def _override_settings(
    target: TargetModel, size: tuple[int, int] | None, classes: Sequence[str], transform: ImageTransform | None
) -> TargetModel:
    """Give a target, which is changed in place, other settings than its own; see `as_target`."""
    if transform is not None:
        target.backbone.pretrained_cfg = {**target.backbone.pretrained_cfg, "transform": transform}
    if size is not None:
        _resize(target, size)
    if classes:
        target.classes = list_names(classes, target.num_classes)
    return target


def _resize(target: TargetModel, size: tuple[int, int]) -> None:
    """Change the size of the images that a target takes; a transformer interpolates its positions."""
    backbone = target.backbone
    try:
        set_size(backbone, size)
        backbone.pretrained_cfg["input_size"] = (len(target.mean), *size)
        target.check_grid(target.grid)
        if (taken := target.grid.size) != size:
            raise ValueError(f"it takes {taken[0]} × {taken[1]} pixels")
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        wanted = f"image_size: expected one that {target.name} can take"
        raise InputError(f"{wanted}, got {size[0]} × {size[1]}: {reason}", "image_size") from error
