"""Finds known backbones inside of a module, and takes what the module computes of an embedding as a head."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import timm.data
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import explainers.models.dinov2_hub as dinov2_hub
import explainers.models.huggingface as huggingface
import explainers.models.torchvision_models as torchvision_models
from explainers.errors import InputError
from explainers.models.heads import Inseparable, NoHead
from explainers.models.mapping import Inputs, channels, check_stated, linear_part, map_to_timm
from explainers.models.model import TargetModel
from explainers.models.outputs import UNIT, are_embeddings, check_no_probabilities
from explainers.models.plain import check_logits, take_logits
from explainers.models.probes import TOLERANCE, Origin, Unmapped, compare_outputs, draw_probes
from explainers.models.wrappers import copy_module, share_weights
from explainers.saved.identity import INACTIVE

LIBRARIES: dict[str, ModuleType] = {
    "dinov2": dinov2_hub,
    "torchvision": torchvision_models,
    "transformers": huggingface,
}
"""Name of a library → module that tells which images a model of it takes, and plans its conversion."""

CHUNK = 64
"""Embeddings that a `Rest` classifies at once: each takes an empty image."""

SHOWN = 6
"""Largest number of layers of a head that a line names."""

Calls = list[tuple[nn.Module, tuple[Any, ...], Any]]
"""Layers, their inputs and their outputs, in the order in which the calls end."""


def is_of_timm(model: nn.Module) -> bool:
    """Whether a module is a model of timm."""
    return hasattr(model, "reset_classifier") and hasattr(model, "forward_features")


def find_library(model: nn.Module) -> Any:
    """Return the module of `LIBRARIES` for a model; `None` for a model of timm, or of no library."""
    return None if is_of_timm(model) else LIBRARIES.get(type(model).__module__.partition(".")[0])


def find_backbones(model: nn.Module) -> list[str]:
    """Name the models of timm and of `LIBRARIES` inside of a module, the largest first."""
    sizes = {}
    for name, part in model.named_modules():
        library = find_library(part)
        if name and (is_of_timm(part) or library is not None and library.is_model(part)):
            sizes[name] = sum(weight.numel() for weight in part.parameters())
    return sorted(sizes, key=lambda name: -sizes[name])


def read_inputs(part: Any, size: tuple[int, int] | None = None) -> Inputs:
    """Return the images that a known backbone takes."""
    library = find_library(part)
    if library is not None:
        inputs: Inputs = library.find_inputs(part, None, size)
        return inputs
    config = timm.data.resolve_model_data_config(part)
    own = getattr(getattr(part, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    size = size or tuple(own)
    if not hasattr(part, "pretrained_cfg"):  # built by its class
        return Inputs(size, None, None, "")
    return Inputs(size, config["mean"], config["std"], "those of its config")


def take_apart(model: nn.Module, name: str, given: Inputs) -> tuple[TargetModel, str]:
    """Take the backbone `name` inside of a module as G, and what the module computes of its embedding as H.

    Args:
        model: any module, which stays as it is.
        name: of a backbone that `find_backbones` returns.
        given: the images that the module takes, as far as they are known.

    Returns:
        The target, in eval mode, and what a line says about it.

    Raises:
        Unmapped: if the outputs of the module are no function of the embedding of this backbone.
        InputError: if the module cannot be copied, or a setting does not fit.
    """
    own = copy_module(model).float().eval()
    part: Any = own.get_submodule(name)
    inside = _embed_like(part, given.size)
    probes = draw_probes(inside.channels, inside.grid.size, inside.mean)
    whole = copy_module(own, share_weights(own))
    try:
        seen, outputs, expected = _record(own, part, probes)
    except (InputError, Unmapped):
        raise
    except Exception as error:  # of the module: only its author can say which
        raise Unmapped(f"it raises {type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    inputs, scale, shift = _read_normalisation(probes, seen, read_inputs(part, given.size), given)
    check_stated(model, mean=inputs.mean, std=inputs.std)
    if given.score != "value":
        check_no_probabilities(expected[:3], type(model).__name__)
    rest = Rest(own, part, inside.head, outputs, probes.shape[1:])
    target = _find_pooling(inside, rest, seen, expected)
    embeddings = target.embed(seen)
    head, layers = _find_head(rest, embeddings)
    difference = compare_outputs(embeddings if isinstance(head, NoHead) else head(embeddings), expected)
    if head is rest:
        rest.drop_unused(part, {layer for layer, *_ in layers})
    target.backbone.pretrained_cfg = target.backbone.pretrained_cfg | {"mean": inputs.mean, "std": inputs.std}
    described, head = _describe(head, layers), linear_part(head) or head
    if not isinstance(head, NoHead) and are_embeddings(expected, given):
        described, head = f"{described}; {UNIT}", NoHead(head)
    found = TargetModel(target.backbone, head, given.score).eval()
    found.classes = inside.classes if head is inside.head else []
    own_input = lambda normalised: take_logits(whole((normalised - shift) / scale), type(model).__name__)  # noqa: E731
    found.origin = Origin(found, own_input)
    kind, library = type(part).__name__, type(part).__module__.partition(".")[0]
    said = f"a {inside.name if is_of_timm(part) else kind} of {library} inside ({name}), with {described}"
    return found, f"{said}; outputs differ by at most {difference:.0g}; {inputs}"


def set_size(part: Any, size: tuple[int, int] | None) -> None:
    """Let a model of timm, changed in place, take images of another size, if one is given; CNNs take any."""
    if size is not None and hasattr(part, "set_input_size"):
        part.set_input_size(img_size=size)


def _embed_like(part: Any, size: tuple[int, int] | None) -> TargetModel:
    """A target of a backbone, which takes images of another size if one is given, in timm's architecture."""
    library = find_library(part)
    try:
        if library is not None:
            return map_to_timm(part, library.plan(part, read_inputs(part, size)))[0]
        if size is not None:
            set_size(part, size)
            in_channels = timm.data.resolve_model_data_config(part)["input_size"][0]
            part.pretrained_cfg = {**part.pretrained_cfg, "input_size": (in_channels, *size)}
        return TargetModel(part).eval()
    except Inseparable:  # the module may use it in another way
        return TargetModel(part, NoHead()).eval()
    except InputError as error:
        raise Unmapped(str(error)) from error


def _record(module: nn.Module, part: Any, images: Tensor) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Run a module on images: what its backbone sees, what the methods of the backbone return, and the logits."""
    name = "forward_features" if hasattr(part, "forward_features") else "forward"
    method, calls = getattr(part, name), []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(((*args, *kwargs.values())[0], method(*args, **kwargs)))
        return calls[-1][1]

    setattr(part, name, recorded)
    logits = take_logits(module(images), type(module).__name__)
    delattr(part, name)
    if not calls:
        raise Unmapped("its forward does not call it")
    check_logits(logits[:3], take_logits(module(images[:1]), type(module).__name__), type(module).__name__)
    seen, output = calls[0]
    outputs = {name: output}
    if is_of_timm(part):
        outputs |= {"pre_logits": part.forward_head(output, pre_logits=True), "logits": part.forward_head(output)}
    return seen, outputs, logits


def _read_normalisation(
    images: Tensor, seen: Tensor, inputs: Inputs, given: Inputs
) -> tuple[Inputs, Tensor | float, Tensor | float]:
    """The images that a module takes, whose backbone sees `seen` of the probe images, and takes `inputs`.

    Returns:
        The images, and by what the module multiplies them, and adds to them, (C, 1, 1) each.
    """
    if seen.shape != images.shape:
        raise Unmapped(
            f"it sees images of shape {list(seen.shape[1:])}, where the module takes {list(images.shape[1:])}"
        )
    drawn, found = (each.transpose(0, 1).flatten(1).double() for each in (images, seen))
    centred = drawn - drawn.mean(1, keepdim=True)
    scale = (centred * found).sum(1) / centred.square().sum(1)
    shift = found.mean(1) - scale * drawn.mean(1)
    if not torch.allclose(scale[:, None] * drawn + shift[:, None], found, rtol=1e-4, atol=1e-4):
        raise Unmapped("it sees other images than the module, which differ by more than a normalisation")
    mean, std = channels("mean", given.mean, len(scale)), channels("std", given.std, len(scale))
    if torch.allclose(seen, images):
        return inputs.override(Inputs(None, mean, std, "")), 1.0, 0.0
    taken = torch.tensor(mean or 0.0).to(scale), torch.tensor(std or 1.0).to(scale)
    means, stds = (taken[0] - shift * taken[1] / scale).round(decimals=6), (taken[1] / scale).round(decimals=6)
    if not ((means >= 0) & (means <= 1) & (stds > 0)).all():
        raise InputError(
            f"std= is needed: the module normalises its images itself, and pixels from 0 to 1 would have mean"
            f" {means.tolist()} and std {stds.tolist()}: give mean=0, std=1/255 if it takes pixels to 255"
        )
    read = replace(inputs, mean=means.tolist(), std=stds.tolist(), origin="those of its own normalisation")
    return read, scale.to(images)[:, None, None], shift.to(images)[:, None, None]


class Rest(nn.Module):
    """What a module computes of the embedding of a backbone inside of it: embeddings (..., D) → logits (..., K).

    The module runs on empty images. Its backbone, which is changed, returns what it would for this embedding, with
    tokens and maps that are the embedding everywhere: whatever else the module reads of it shows in the logits.

    Args:
        module: the module.
        part: the backbone inside of it.
        classifier: the backbone's own classification layer, or `NoHead`.
        outputs: name of a method of the backbone → what it returns for some images.
        image: shape of an image that the module takes, (C, H, W).
    """

    def __init__(
        self, module: nn.Module, part: Any, classifier: nn.Module, outputs: dict[str, Any], image: torch.Size
    ) -> None:
        super().__init__()
        self.module = module
        self.classifier = classifier
        self.pooler = part.pooler if hasattr(getattr(part, "pooler", None), "dense") else None  # of transformers' ViT
        self.outputs = tree_map(lambda each: each[:1].to("meta") if isinstance(each, Tensor) else each, outputs)
        self.image = image
        self.embeddings = torch.empty(0)
        if "forward" in outputs:
            part.forward = self._forward
        else:
            part.forward_features = self._features
        if "logits" in outputs:
            part.forward_head = self._head

    def forward(self, embeddings: Tensor) -> Tensor:
        flat = embeddings.reshape(-1, embeddings.shape[-1])
        return torch.cat([self.run(some) for some in flat.split(CHUNK)]).unflatten(0, embeddings.shape[:-1])

    def run(self, embeddings: Tensor) -> Tensor:
        """Compute the logits (B, K) of images that the backbone embeds as `embeddings`, (B, D)."""
        self.embeddings = embeddings
        logits = take_logits(
            self.module(embeddings.new_zeros(len(embeddings), *self.image)), type(self.module).__name__
        )
        self.embeddings = torch.empty(0)
        return logits

    def drop_unused(self, part: nn.Module, called: set[nn.Module]) -> None:
        """Drop the layers and weights of the backbone that the logits do not need."""
        for name, layer in part.named_children():
            if called.isdisjoint(layer.modules()):
                setattr(part, name, nn.Identity())
        for name, _ in list(part.named_parameters(recurse=False)):
            setattr(part, name, None)

    def _forward(self, *_: Any, **__: Any) -> Any:
        return tree_map(self._fill, self.outputs["forward"])

    def _features(self, *_: Any, **__: Any) -> Any:
        return tree_map(partial(self._fill, pre_logits=True), self.outputs["forward_features"])

    def _head(self, features: Any, pre_logits: bool = False) -> Any:
        return self._fill(self.outputs["pre_logits" if pre_logits else "logits"], pre_logits)

    def _fill(self, like: Any, pre_logits: bool = False) -> Any:
        """Return a tensor like one of a single image: the logits, or the embedding in each place."""
        if not isinstance(like, Tensor):
            return like
        if like.dim() == 2 and not pre_logits and not isinstance(self.classifier, NoHead):
            return self.classifier(self.embeddings)
        if like.dim() == 2:
            return self.embeddings if self.pooler is None else self.pooler(self.embeddings[:, None])
        count, width = self.embeddings.shape
        axis = 1 if like.dim() == 4 and like.shape[1] == width else like.dim() - 1
        alone = [count, *[1] * (like.dim() - 1)]
        alone[axis] = width
        places = [count, *like.shape[1:]]
        places[axis] = width
        return self.embeddings.view(alone).expand(places)


def _find_pooling(inside: TargetModel, rest: Rest, seen: Tensor, expected: Tensor) -> TargetModel:
    """Change how a target pools tokens or maps, until the rest of the module is a function of its embedding."""
    reason = ""
    for target in _poolings(inside):
        try:
            difference = compare_outputs(rest(target.embed(seen)), expected)
        except Exception as error:  # of a module that takes something else than an embedding
            reason = f"it raises {type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        if difference < TOLERANCE:
            return target
        reason = f"the outputs of a head on its embedding differ by {difference:.1g}"
    raise Unmapped(reason)


def _poolings(target: TargetModel) -> Iterator[TargetModel]:
    """A target as it is; then, as a module may pool the features itself, with class tokens and averages."""
    yield target
    backbone = target.backbone
    for pooling, prefix in (("token", False), ("avg", False), ("avg", True)):
        try:
            backbone.reset_classifier(0, pooling)
        except Exception:  # the model has none of this kind
            continue
        if hasattr(backbone, "fc_norm"):
            backbone.fc_norm, backbone.pool_include_prefix = nn.Identity(), prefix
        yield target


def _find_head(rest: Rest, embeddings: Tensor) -> tuple[nn.Module, Calls]:
    """Find the layer that computes the logits of the embedding, otherwise the rest; and the layers that it calls."""
    calls: Calls = []
    with ExitStack() as stack:
        for layer in rest.modules():
            stack.callback(layer.register_forward_hook(lambda *call: calls.append(call)).remove)
        logits = rest.run(embeddings)

    def is_embedding(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == embeddings.shape and torch.allclose(value, embeddings, 1e-6)

    if is_embedding(logits):
        return NoHead(), []
    alone = (layer for layer, inputs, output in reversed(calls) if output is logits and any(map(is_embedding, inputs)))
    head = next(alone, rest)
    return head, [call for call in calls if head is rest or call[0] in set(head.modules())]


def _describe(head: nn.Module, calls: Calls) -> str:
    """Name the layers of a head."""
    if isinstance(head, NoHead):
        return "no head"
    leaves = [
        type(layer).__name__ for layer, *_ in calls if not [*layer.children()] and not isinstance(layer, INACTIVE)
    ]
    return f"the rest as its head ({', '.join(leaves[:SHOWN])}{', ...' * (len(leaves) > SHOWN)})"
