"""torchvision's ViT, Swin, Swin v2, ResNet and ConvNeXt as models of timm."""

import operator
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm
from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.models.mapping import Inputs, Mapped, Plan, Table, Weights, linear_part, rename_weights
from explainers.models.preprocessing import read_processor
from explainers.models.probes import Unmapped

VIT: Table = (
    (r"^heads\.", None),
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:3|linear_2)\.", ".mlp.fc2."),
)


def _stage(match: re.Match[str]) -> str:
    """`features` alternates layers that halve the map with stages of blocks; timm counts both as one."""
    number = int(match[1])
    return f"stages.{(number - 1) // 2}.blocks." if number % 2 else f"stages.{number // 2}.downsample."


SWIN: Table = (
    (r"^head\.", None),
    (r"relative_position_index$|relative_coords_table$", None),
    (r"^features\.0\.0\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    (r"^features\.(\d+)\.", _stage),
    (r"^stages\.", "layers."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
)
RESNET: Table = ((r"^fc\.", None),)
CONVNEXT: Table = (
    (r"^classifier\.2\.", None),
    (r"^classifier\.0\.", "head.norm."),
    (r"^features\.0\.", "stem."),
    (r"^features\.(\d+)\.", _stage),
    (r"\.block\.0\.", ".conv_dw."),
    (r"\.block\.2\.", ".norm."),
    (r"\.block\.3\.", ".mlp.fc1."),
    (r"\.block\.5\.", ".mlp.fc2."),
    (r"\.layer_scale$", ".gamma"),
)


def _vit(model: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    first = model.encoder.layers[0]
    sizes = {
        "img_size": size,
        "patch_size": model.patch_size,
        "embed_dim": model.hidden_dim,
        "depth": len(model.encoder.layers),
        "num_heads": first.num_heads,
        "mlp_ratio": model.mlp_dim / model.hidden_dim,
        "norm_layer": partial(LayerNorm, eps=first.ln_1.eps),
    }
    return "vit_base_patch16_224", sizes, rename_weights(weights, VIT)


def _swin(model: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    stages = model.features[1::2]
    first = stages[0][0]
    named = rename_weights(weights, SWIN)
    second_version = hasattr(first.attn, "logit_scale")
    if second_version:  # the bias of keys has no effect
        for name in [name for name in named if name.endswith("qkv.bias")]:
            query, _, value = named.pop(name).chunk(3)
            prefix = name.removesuffix("qkv.bias")
            named |= {f"{prefix}q_bias": query, f"{prefix}v_bias": value}
    sizes = {
        "img_size": size,
        "patch_size": model.features[0][0].kernel_size[0],
        "embed_dim": model.features[0][0].out_channels,
        "depths": tuple(len(stage) for stage in stages),
        "num_heads": tuple(stage[0].attn.num_heads for stage in stages),
        "window_size": tuple(first.attn.window_size),
        "mlp_ratio": first.mlp[0].out_features / first.mlp[0].in_features,
        "norm_layer": partial(nn.LayerNorm, eps=first.norm1.eps),
    }
    return "swinv2_tiny_window8_256" if second_version else "swin_tiny_patch4_window7_224", sizes, named


def _resnet(model: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    stages = [model.layer1, model.layer2, model.layer3, model.layer4]
    sizes = {
        "block": Bottleneck if hasattr(stages[0][0], "conv3") else BasicBlock,
        "layers": tuple(len(stage) for stage in stages),
        "cardinality": model.groups,
        "base_width": model.base_width,
    }
    return "resnet50", sizes, rename_weights(weights, RESNET)


def _convnext(model: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    stages = model.features[1::2]
    named = rename_weights(weights, CONVNEXT)
    flat = {name: weight.flatten() if name.endswith("gamma") else weight for name, weight in named.items()}
    sizes = {"depths": [len(stage) for stage in stages], "dims": [len(stage[0].layer_scale) for stage in stages]}
    return "convnext_tiny", sizes, flat


FAMILIES: dict[str, tuple[Callable[..., Mapped], Callable[[Any], nn.Module]]] = {
    "VisionTransformer": (_vit, lambda model: model.heads),
    "SwinTransformer": (_swin, lambda model: model.head),
    "ResNet": (_resnet, lambda model: model.fc),
    "ConvNeXt": (_convnext, lambda model: model.classifier[2]),
}
"""Name of a class of torchvision → function that maps it, and its classification layer."""


def plan(model: Any, inputs: Inputs) -> Plan:
    """Plan how a model of torchvision becomes a model of timm; `Unmapped` if timm has no such architecture."""
    family = type(model).__name__
    if family not in FAMILIES:
        raise Unmapped(f"only {', '.join(FAMILIES)} of torchvision are converted")
    convert, head_of = FAMILIES[family]
    try:
        mapped, head = convert(model, model.state_dict(), inputs.size), linear_part(head_of(model))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise Unmapped(f"it is not built as torchvision's {family} is ({error})") from error
    return Plan(f"torchvision {family}", *mapped, head, operator.call, inputs)


def is_model(module: nn.Module) -> bool:
    """Whether a module of torchvision is a whole model that may be converted."""
    return type(module).__name__ in FAMILIES


def find_inputs(model: Any, weights: Any = None, size: tuple[int, int] | None = None) -> Inputs:
    """Return the images that a model of torchvision takes.

    Args:
        model: the model.
        weights: the entry of torchvision's enumeration that the model was built with, such as
            `ResNet50_Weights.DEFAULT`: its mean, standard deviation, image size and class names are taken.
        size: height and width of the images in pixels; None takes those of the model, or of the weights, or 224. An
            InputError names a size that the model does not take.
    """
    own = getattr(model, "image_size", None)  # of a ViT, whose positions fix it
    if own and size not in (None, (own, own)):
        takes = f"as this {type(model).__name__} takes"
        raise InputError(f"expected image_size={own}, {takes}, got another: leave it out", "image_size")
    if type(model).__module__.startswith("torchvision.models.detection"):
        return Inputs(size or (224, 224), (0.0,) * 3, (1.0,) * 3, "because a detector normalises pixels itself")
    if weights is None:
        size = size or (own or 224,) * 2
        usual = ImageTransform(size, "center", 0.875, "bilinear")
        origin = "the usual ones of torchvision's weights"
        return Inputs(size, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, origin, transform=usual)
    try:
        found, classes = read_processor(weights.transforms()), list(weights.meta.get("categories", ()))
        size = size or ((own, own) if own else found.transform.size)
        transform = replace(found.transform, size=size)
        return Inputs(size, found.mean, found.std, f"those of {weights}", classes, transform)
    except (AttributeError, InputError) as error:
        raise InputError(
            "expected weights of a classifier as torchvision names them, such as ResNet50_Weights.DEFAULT, got"
            f" {weights!r}: leave out weights, and load a file into the model before"
        ) from error
