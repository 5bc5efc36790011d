"""CLIP of OpenAI and of open_clip: its image tower as a model of timm. They are known by their parts, not imported."""

import operator
from functools import partial
from typing import Any

import timm.data
from timm.layers import LayerNorm
from torch import nn

from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.masking import read_size
from explainers.models.heads import NoHead, TextProjection
from explainers.models.mapping import (
    Inputs,
    Plan,
    Table,
    linear_part,
    map_to_timm,
    rename_weights,
    state_statistics,
)
from explainers.models.model import TargetModel
from explainers.models.plain import plain_target
from explainers.models.probes import Unmapped

TOWER: Table = (
    (r"^proj$", None),
    (r"^conv1\.", "patch_embed.proj."),
    (r"^ln_pre\.", "norm_pre."),
    (r"^ln_post\.", "norm."),
    (r"^class_embedding$", "cls_token"),
    (r"^positional_embedding$", "pos_embed"),
    (r"^transformer\.resblocks\.", "blocks."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
PARTS = {"conv1", "class_embedding", "positional_embedding", "transformer", "ln_post", "proj"}
"""Parts of an image tower that is a ViT."""


def is_clip(model: Any) -> bool:
    """Whether a module is a model of CLIP, or its image tower: a ViT, a ResNet, or a model of timm (`trunk`)."""
    tower = find_tower(model)
    own = all(hasattr(tower, name) for name in PARTS) or hasattr(tower, "attnpool") and hasattr(tower, "layer4")
    return (
        own
        or isinstance(getattr(tower, "head", None), nn.Module)
        and hasattr(getattr(tower, "trunk", None), "reset_classifier")
    )


def find_tower(model: Any) -> Any:
    """Return the image tower of a model with two towers; other modules are returned as they are."""
    return model.visual if hasattr(model, "encode_image") and hasattr(model, "visual") else model


def find_inputs(tower: Any, size: tuple[int, int] | None = None) -> Inputs:
    """Return the images that a tower takes; without what open_clip states in it, they are those of OpenAI's CLIP."""
    stated: Any = getattr(tower, "image_size", None) or getattr(tower, "input_resolution", 224)
    size = size or read_size(stated)
    mean = getattr(tower, "image_mean", None) or timm.data.OPENAI_CLIP_MEAN
    std = getattr(tower, "image_std", None) or timm.data.OPENAI_CLIP_STD
    origin = "as it states" if getattr(tower, "image_mean", None) else "those of OpenAI's CLIP"
    squashes = getattr(tower, "preprocess_cfg", {}).get("resize_mode") == "squash"
    transform = ImageTransform(size, resize="squash" if squashes else "center")
    return Inputs(size, mean, std, origin, (), transform)


def clip_target(tower: Any, inputs: Inputs) -> tuple[TargetModel, str]:
    """Make a target of an image tower, which embeds and has no classes, and say what became of it."""
    try:
        if hasattr(tower, "trunk"):
            target = TargetModel(state_statistics(tower.trunk, inputs), _projection(tower.head))
            return target.float().eval(), "is the model of timm inside of it"
        target, difference = map_to_timm(tower, plan(tower, inputs))
        return target, f"is computed in timm's architecture, with outputs that differ by at most {difference:.0g}"
    except Unmapped as reason:
        target = plain_target(tower, inputs)
        target.head = NoHead()
        return target, f"stays as it is, because {reason}"


def plan(tower: Any, inputs: Inputs) -> Plan:
    """Plan how an image tower that is a ViT becomes one of timm; `Unmapped` for others."""
    if not all(hasattr(tower, name) for name in PARTS):
        raise Unmapped("its image tower is no ViT")
    named = rename_weights(tower.state_dict(), TOWER)
    named = {name.replace(".ls_", ".ls"): weight for name, weight in named.items()}
    named |= {"cls_token": named["cls_token"].reshape(1, 1, -1), "pos_embed": named["pos_embed"][None]}
    first = tower.transformer.resblocks[0]
    quick = any(type(part).__name__ == "QuickGELU" for part in first.modules())
    sizes = {
        "img_size": inputs.size,
        "patch_size": tower.conv1.kernel_size[0],
        "embed_dim": tower.conv1.out_channels,
        "depth": len(tower.transformer.resblocks),
        "num_heads": first.attn.num_heads,
        "mlp_ratio": first.mlp.c_fc.out_features / tower.conv1.out_channels,
        "pre_norm": True,
        "norm_layer": partial(LayerNorm, eps=tower.ln_post.eps),
        "act_layer": "quick_gelu" if quick else "gelu",
        "init_values": 1.0 if "blocks.0.ls1.gamma" in named else None,
    }
    head = None if tower.proj is None else TextProjection(tower.proj.detach().T)
    return Plan("clip image tower", "vit_base_patch16_clip_224", sizes, named, head, operator.call, inputs)


def _projection(head: nn.Module) -> nn.Module:
    """The head of a tower with a model of timm: none, a projection, or several layers, which are not supported."""
    layer = linear_part(head)
    if layer is None:
        return NoHead()
    if not isinstance(layer, nn.Linear):
        raise InputError(
            "expected an image tower with one projection, got one with several layers: give model.visual.trunk"
        )
    return TextProjection(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
