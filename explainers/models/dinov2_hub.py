"""torch.hub's DINOv2, of facebookresearch/dinov2, as a model of timm."""

import operator
from functools import partial
from math import isqrt
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm, SwiGLUPacked
from torch import nn

from explainers.errors import InputError
from explainers.models.mapping import Inputs, Mapped, Plan, Table, Weights, linear_part, rename_weights
from explainers.models.probes import Unmapped

NAMES: Table = (
    (r"^(mask_token$|head\.)", None),
    (r"^register_tokens$", "reg_token"),
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # in chunks
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)


def is_model(module: nn.Module) -> bool:
    """Whether a module of dinov2 is the whole backbone."""
    return type(module).__name__ == "DinoVisionTransformer"


def find_inputs(model: Any, weights: Any = None, size: tuple[int, int] | None = None) -> Inputs:
    """Return the images that a model takes: by default those of its positions, of 518 pixels for the hub's models."""
    if weights is not None:
        raise InputError("weights= is for the name of a timm model, and this DINOv2 has its own: drop weights")
    side = isqrt(model.pos_embed.shape[1] - 1) * model.patch_size
    return Inputs(size or (side, side), IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, "ImageNet's, as DINOv2's")


def plan(model: Any, inputs: Inputs) -> Plan:
    """Plan how a model becomes a model of timm, with the positions that it interpolates for the size of the images."""
    height, width = inputs.size or (0, 0)
    try:
        named = rename_weights(model.state_dict(), NAMES)
        patches = (height // model.patch_size) * (width // model.patch_size)
        tokens = model.pos_embed.new_zeros(1, 1 + patches, model.embed_dim)
        named["pos_embed"] = model.interpolate_pos_encoding(tokens, height, width).detach()
        sizes: dict[str, Any] = {
            "img_size": (height, width),
            "patch_size": model.patch_size,
            "embed_dim": model.embed_dim,
            "depth": model.n_blocks,
            "num_heads": model.num_heads,
            "mlp_ratio": (len(named["blocks.0.mlp.fc1.weight"]) + 0.5) / model.embed_dim,  # timm rounds down
            "qkv_bias": "blocks.0.attn.qkv.bias" in named,
            "init_values": 1.0 if "blocks.0.ls1.gamma" in named else None,
            "norm_layer": partial(LayerNorm, eps=model.norm.eps),
        }
        head = linear_part(model.head)
    except (AttributeError, KeyError) as error:
        raise Unmapped(f"it is not built as DINOv2 of torch.hub is ({error})") from error
    gated = any(".mlp.w12." in name for name in model.state_dict())
    return Plan("torch.hub DINOv2", *finish_dinov2(sizes, named, gated), head, operator.call, inputs)


def finish_dinov2(sizes: dict[str, Any], named: Weights, gated: bool) -> Mapped:
    """Add to the sizes of a DINOv2 whether its MLPs have gates, and its registers, which have no positions."""
    if gated:
        sizes |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    if "reg_token" in named:
        named |= {"cls_token": named["cls_token"] + named["pos_embed"][:, :1], "pos_embed": named["pos_embed"][:, 1:]}
        sizes |= {"reg_tokens": named["reg_token"].shape[1], "no_embed_class": True}
    return "vit_base_patch14_dinov2", sizes, named
