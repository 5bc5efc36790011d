"""What models of other libraries take, and the same models in timm's architecture, with the same outputs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.models.heads import NoHead
from explainers.models.model import TargetModel
from explainers.models.names import list_names
from explainers.models.probes import TOLERANCE, Origin, Unmapped, compare_outputs, draw_probes
from explainers.models.scores import Score
from explainers.models.wrappers import copy_module, share_weights

Statistics = float | Sequence[float] | None
"""Mean or standard deviation of pixels from 0 to 1: one for all channels, or one for each; None for the model's own."""

Table = Sequence[tuple[str, str | Callable[[re.Match[str]], str] | None]]
"""Patterns of names, and what replaces them, in this order; None drops the weights whose names match."""

Weights = dict[str, Tensor]

Mapped = tuple[str, dict[str, Any], Weights]
"""Name of an architecture in timm, the arguments of its size, and the weights by timm's names."""


@dataclass(frozen=True)
class Inputs:
    """The images that a model takes, and what its outputs mean: as its library says it, or as a user states it.

    Args:
        size: height and width of the images in pixels; None if not known.
        mean: mean of pixels from 0 to 1, one number for each channel; None if not known.
        std: their standard deviation; None if not known.
        origin: where mean and standard deviation come from, for messages.
        classes: names of the classes, in the order of the logits; empty if they are not known.
        transform: how photos become these images; None if not known.
        score: what the outputs mean; None if not known, see `TargetModel`.
    """

    size: tuple[int, int] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    origin: str
    classes: Sequence[str] = ()
    transform: ImageTransform | None = None
    score: Score | None = None

    def override(self, given: "Inputs") -> "Inputs":
        """Override the settings that are given, except the size."""
        stated = [name for name in ("mean", "std") if getattr(given, name) is not None]
        origin = {0: self.origin, 1: f"{' '.join(stated)} as given, else {self.origin}", 2: "as given"}[len(stated)]
        return replace(
            self,
            mean=given.mean or self.mean,
            std=given.std or self.std,
            origin=origin,
            classes=given.classes or self.classes,
            transform=given.transform or self.transform,
            score=given.score or self.score,
        )

    def __str__(self) -> str:
        if self.mean is None or self.std is None:
            return "mean and std not known"
        mean, std = (" ".join(f"{value:.3g}" for value in values) for values in (self.mean, self.std))
        photos = f", {self.transform}" if self.transform else ""
        return f"mean {mean}, std {std}{photos} ({self.origin})"


@dataclass(frozen=True)
class Plan:
    """How a model of another library becomes a model of timm.

    Args:
        name: what messages and results call the model.
        architecture: name in timm of a model of the same architecture, in any size.
        arguments: what `timm.create_model` needs for the size of this one.
        weights: the weights of the backbone by timm's names.
        head: the classification layer; None for a model that only embeds.
        outputs: function of the original and normalised images (B, 3, S, S): logits (B, K), or embeddings (B, D).
        inputs: S, how pixels are normalised, and the names of the classes.
        pool: changes what the model embeds, in place, such as `class_and_patches`; None for timm's own pooling.
    """

    name: str
    architecture: str
    arguments: dict[str, Any]
    weights: Weights
    head: nn.Module | None
    outputs: Callable[[Any, Tensor], Tensor]
    inputs: Inputs
    pool: Callable[[Any], None] | None = None


def class_and_patches(model: Any) -> None:
    """Let a ViT of timm, changed in place, embed class token and mean of the patches: (B, 2D), as heads of DINOv2 read.

    >>> model = timm.create_model("test_vit", num_classes=0)
    >>> class_and_patches(model)
    >>> model.forward_head(torch.ones(1, 101, 64)).shape
    torch.Size([1, 128])
    """
    model.pool = partial(_join_class_and_patches, prefix=model.num_prefix_tokens)
    model.global_pool = "token and avg"
    model.head_hidden_size *= 2


def _join_class_and_patches(tokens: Tensor, prefix: int, pool_type: str | None = None) -> Tensor:
    return torch.cat([tokens[:, 0], tokens[:, prefix:].mean(1)], -1)


def state_statistics(model: Any, inputs: Inputs) -> Any:
    """Return a model of timm in float32 and eval mode, with the same weights, that states the mean and std given."""
    stated: Any = copy_module(model, share_weights(model)).float().eval()
    stated.pretrained_cfg = dict(getattr(model, "pretrained_cfg", {"architecture": type(model).__name__})) | {
        name: tuple(values) for name, values in (("mean", inputs.mean), ("std", inputs.std)) if values is not None
    }
    return stated


def map_to_timm(original: nn.Module, plan: Plan) -> tuple[TargetModel, float]:
    """Build the target that a plan describes, in eval mode, and return it with the largest difference of outputs.

    Raises:
        Unmapped: if the weights do not fit timm's model, or its outputs differ.
        InputError: if the original fails on images of this size.
    """
    target = _build(plan).to(next(original.parameters()).device)
    difference = _compare_models(original, plan, target)
    if not difference < TOLERANCE:
        raise Unmapped(f"the outputs of timm's {plan.architecture} with its weights differ by {difference:.1g}")
    return target, difference


def _build(plan: Plan) -> TargetModel:
    try:
        model: Any = timm.create_model(plan.architecture, pretrained=False, num_classes=0, **plan.arguments)
        model.float().load_state_dict({name: weight.detach().cpu().float() for name, weight in plan.weights.items()})
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[:2][-1].strip()[:120]
        raise Unmapped(f"its weights are not those of timm's {plan.architecture} ({first})") from error
    if plan.pool is not None:
        plan.pool(model)
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "architecture": plan.name,
        "input_size": (3, *(plan.inputs.size or ())),
        "mean": tuple(plan.inputs.mean or ()),
        "std": tuple(plan.inputs.std or ()),
        "transform": plan.inputs.transform,
    }
    head = NoHead() if plan.head is None else copy_module(plan.head).cpu().float()
    target = TargetModel(model, head, plan.inputs.score)
    if plan.inputs.classes:
        target.classes = list_names(plan.inputs.classes, target.num_classes)
    return target.eval()


@torch.no_grad()
def _compare_models(original: nn.Module, plan: Plan, target: TargetModel) -> float:
    """Compare the outputs of a model and of its target for probe images, see `compare_outputs`."""
    copied = copy_module(original, share_weights(original)).eval().float()
    images = draw_probes(target.channels, target.grid.size, target.mean)
    try:
        expected = plan.outputs(copied, images)
    except AttributeError as error:
        raise Unmapped(f"it returns something else than its class does ({error})") from error
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        height, width = target.grid.size
        raise InputError(
            f"expected a model of images of {height} × {width} pixels, got {type(original).__name__}, which fails on"
            f" them ({' '.join(str(error).split())[:120]}): give image_size, or drop it"
        ) from error
    embeddings = target.embed(images)
    # By the original head, which may have become two classes
    found = embeddings if plan.head is None else copy_module(plan.head).eval().float()(embeddings)
    target.origin = Origin(target, partial(plan.outputs, copied))
    return compare_outputs(found, expected)


def linear_part(head: nn.Module) -> nn.Module | None:
    """Return the only layer of a head that computes, if it is linear; None for an identity; otherwise the head.

    >>> linear_part(nn.Sequential(nn.Dropout(), nn.Linear(2, 3)))
    Linear(in_features=2, out_features=3, bias=True)
    """
    idle = nn.Identity | nn.Dropout
    parts = [part for part in (head if isinstance(head, nn.Sequential) else [head]) if not isinstance(part, idle)]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else head


def rename_weights(weights: Mapping[str, Tensor], table: Table) -> Weights:
    """Rename weights by a table.

    >>> table = [(r"ln_(\\d)", r"norm\\1"), ("step", None)]
    >>> rename_weights({"ln_1.bias": torch.zeros(1), "step": torch.zeros(1)}, table)
    {'norm1.bias': tensor([0.])}
    """
    found = {}
    for old, weight in weights.items():
        name: str | None = old
        for pattern, replacement in table:
            if name is None or replacement is None:
                name = None if name is None or re.search(pattern, name) else name
            else:
                name = re.sub(pattern, replacement, name)
        if name is not None:
            found[name] = weight
    return found


def join_weights(weights: Mapping[str, Tensor], parts: Sequence[str], whole: str) -> Weights:
    """Join weights whose layers timm computes as one: `a.q.weight`, `a.k.weight`, `a.v.weight` → `a.qkv.weight`.

    >>> join_weights({"q.weight": torch.zeros(1, 2), "v.weight": torch.ones(1, 2)}, ["q", "v"], "qv")
    {'qv.weight': tensor([[0., 0.],
            [1., 1.]])}
    """
    rest = dict(weights)
    for name in weights:
        first = re.fullmatch(rf"(.*\.)?{re.escape(parts[0])}\.(weight|bias)", name)
        if first:
            prefix, kind = first[1] or "", first[2]
            rest[f"{prefix}{whole}.{kind}"] = torch.cat([rest.pop(f"{prefix}{part}.{kind}") for part in parts])
    return rest


def channels(name: str, given: Statistics, count: int) -> list[float] | None:
    """Return one number for each of `count` channels; None if none is given.

    >>> channels("std", 0.5, 3)
    [0.5, 0.5, 0.5]
    """
    if given is None:
        return None
    values = [given] * count if isinstance(given, int | float) else list(given)
    fits = len(values) == count and all(isinstance(value, int | float) for value in values)
    if not fits or not all(value > 0 if name == "std" else 0 <= value <= 1 for value in values):
        allowed = "above 0" if name == "std" else "from 0 to 1"
        raise InputError(
            f"expected {name} of pixels from 0 to 1, {count} numbers {allowed}, got {given}: give, for example,"
            f" {name}=0.5, and divide those of pixels to 255 by 255"
        )
    return [float(value) for value in values]


def check_stated(model: nn.Module, **stated: Any) -> None:
    """Raise an InputError for a setting of `as_target` that is None, where the model does not say it."""
    missing = " and no ".join(key for key, value in stated.items() if value is None)
    if missing:
        *others, last = stated
        raise InputError(
            f"expected {', '.join(others)} and {last} of the images on which {model._get_name()} was trained, got no"
            f" {missing}: give as_target(model, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),"
            " image_size=224), as for ImageNet, in its place; mean=0, std=1 if it takes pixels from 0 to 1"
        )
