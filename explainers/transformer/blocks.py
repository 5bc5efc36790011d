"""Blocks of timm's transformers: where the model keeps them, their tokens, and how the embedding depends on these.

Only this file and `recording` access the inside of a block. They support ViT (also with registers, average pooling or
relative positions), NaFlexVit at its own image size, DeiT, BEiT, EVA and DINOv3, and Swin wherever global attention is
not needed.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from timm.layers import DiffAttention
from timm.models.beit import Beit
from timm.models.eva import Eva, EvaBlockPostNorm
from timm.models.naflexvit import NaFlexVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
from torch import Tensor, nn

from explainers.errors import InputError, UnsupportedModel, checks_choices
from explainers.masking import map_shape
from explainers.models import TargetModel
from explainers.models.gradients import BY_MASKS

Features = Literal["attention", "norm"]


def is_transformer(target: TargetModel) -> bool:
    """Whether a target has the blocks that `find_blocks` returns."""
    return bool(_find_known_blocks(target.backbone))


def find_blocks(target: TargetModel) -> list[nn.Module]:
    """Return the transformer blocks of a target, from input to output; an UnsupportedModel if it has none."""
    blocks = _find_known_blocks(target.backbone)
    if not blocks:
        raise UnsupportedModel(
            "a transformer with blocks of attention and MLP that normalise their inputs",
            target.name,
            "a ViT, DeiT, EVA or Swin, or a method for any model, such as RISE or IntegratedGradients"
            " (explainers.posthoc.methods_for lists them)",
        )
    return blocks


def _find_known_blocks(backbone: Any) -> list[nn.Module]:
    """Return the blocks of a transformer; none for other models."""
    stages = [backbone] if hasattr(backbone, "blocks") else getattr(backbone, "layers", [])
    blocks = [block for stage in stages for block in getattr(stage, "blocks", [])]
    known = isinstance(backbone, VisionTransformer | VisionTransformerRelPos | NaFlexVit | Eva | Beit | SwinTransformer)
    passes = [getattr(type(backbone), name, None) for name in ("forward_features", "forward_head")]
    known &= all(each.__module__.startswith("timm.") for each in passes if each)  # a subclass may pool otherwise
    return blocks if known and all(_is_known(block) for block in blocks) else []


def _is_known(block: nn.Module) -> bool:
    """Whether a block runs attention and then an MLP, and normalises their inputs rather than their outputs."""
    attention = getattr(block, "attn", None)
    post_norm = isinstance(block, ResPostBlock | ResPostRelPosBlock | EvaBlockPostNorm)
    unusual = post_norm or isinstance(attention, DiffAttention)
    return hasattr(attention, "fused_attn") and hasattr(block, "norm2") and not unusual


def layer_index(target: TargetModel, layer: int | None, layers: Sequence[nn.Module] | None = None) -> int:
    """Return the index from 0 to L − 1 of one of `layers`, by default blocks; a negative one counts from the end.

    `None` is the middle one, m = ⌈L/2⌉ (SkipPLUS, Equation 4).
    """
    count = len(find_blocks(target) if layers is None else layers)
    if layer is None:
        return min(-(-count // 2), count - 1)  # with a single layer, index 0
    if layer not in range(-count, count):
        raise InputError(f"expected a layer from {-count} to {count - 1} of {target.name}, got {layer}")
    return layer % count


def num_prefix_tokens(target: TargetModel) -> int:
    """Return the number of class, distillation and register tokens, which precede the patch tokens."""
    return int(getattr(target.backbone, "num_prefix_tokens", 0))


def readout(target: TargetModel, num_tokens: int) -> Tensor:
    """Return the weight of each of T output tokens in the embedding, (T,), for a class token or average pooling.

    Raises:
        UnsupportedModel: if attention is not global, or the embedding is no class token and no average of tokens.
    """
    backbone, prefix = target.backbone, num_prefix_tokens(target)
    if find_blocks(target) and not hasattr(backbone, "blocks"):
        raise UnsupportedModel(
            "a model with global attention",
            f"{target.name}, whose tokens attend within windows",
            "a ViT, or a method without attention maps, such as InputXGradient-PLUS, GradCAM or ViTCX",
        )
    pooling = getattr(backbone, "global_pool", "token")
    weights = torch.zeros(num_tokens, dtype=target.mean.dtype, device=target.mean.device)
    if target.distilled or pooling == "token":
        weights[: 1 + target.distilled] = 1
    elif pooling == "avg":
        weights[0 if getattr(backbone, "pool_include_prefix", False) else prefix :] = 1
    else:
        raise UnsupportedModel(
            "a class token or average pooling",
            f"the pooling {pooling!r} of {target.name}",
            "a method for any pooling, such as DecompX-SkipPLUS",
        )
    return weights / weights.sum()


def embed_tokens(target: TargetModel, tokens: Tensor) -> Tensor:
    """Embed the output (B, T, D) of any block as the model embeds the output of its last block: (B, D)."""
    return target.pool(target.backbone.norm(tokens))


def embed_each(target: TargetModel, tokens: Tensor) -> Tensor:
    """Embed each token (B, T, D) as the model embeds the one that it reads, or their average: (B, T, D)."""
    normalised: Tensor = target.backbone.norm(tokens)
    return getattr(target.backbone, "fc_norm", nn.Identity())(normalised)


def head_projections(target: TargetModel, layer: int) -> Tensor:
    """Return the linear map from the output of each head of a block to the tokens: (D, A, d), with the layer scale.

    Raises:
        UnsupportedModel: if the model normalises or gates the heads before the projection, or if it is quantised.
    """
    block: Any = find_blocks(target)[layer]
    if not isinstance(getattr(block.attn, "norm", nn.Identity()), nn.Identity) or getattr(block.attn, "gate", None):
        raise UnsupportedModel(
            "attention whose heads are only projected",
            f"{target.name}, which normalises or gates them",
            "a method that does not separate heads, such as DecompX-SkipPLUS or GAE",
        )
    if not isinstance(block.attn.proj.weight, Tensor):
        raise UnsupportedModel("a model with floating-point weights", f"{target.name}, which is quantised", BY_MASKS)
    weight = block.attn.proj.weight.detach().unflatten(1, (block.attn.num_heads, -1))
    scale = layer_scale(block, "attention")
    return weight if scale is None else weight * scale[:, None, None]


@checks_choices
def layer_scale(block: Any, part: Literal["attention", "mlp"]) -> Tensor | None:
    """Return the factors (D,) of what a part of a block adds to the tokens, if any."""
    number = 1 if part == "attention" else 2
    if hasattr(block, f"gamma_{number}"):
        scale = getattr(block, f"gamma_{number}")
    else:
        scale = getattr(getattr(block, f"ls{number}"), "gamma", None)
    return None if scale is None else scale.detach()


def value_paths(target: TargetModel, values: Tensor, layer: int) -> Tensor:
    """Compute f_h(x_j), the value of token j in head h (B, A, T, d), after the projection to tokens: (B, A, T, D).

    The output of attention for token i is the bias of the projection plus Σ_h Σ_j A^h_ij f_h(x_j).
    """
    weight = head_projections(target, layer)
    return torch.einsum("bhtc,dhc->bhtd", values.detach().to(weight.dtype), weight)


def project_heads(target: TargetModel, heads: Tensor, layer: int) -> Tensor:
    """Compute what the attention of a block adds to the tokens, if its heads return (B, A, T, d): (B, T, D)."""
    block: Any = find_blocks(target)[layer]
    weight, scale = head_projections(target, layer).flatten(1), layer_scale(block, "attention")
    bias = block.attn.proj.bias
    bias = bias if bias is None or scale is None else bias * scale
    return nn.functional.linear(heads.transpose(1, 2).flatten(2), weight, bias)


def apply_mlp(target: TargetModel, tokens: Tensor, layer: int) -> Tensor:
    """Apply the MLP of a block, with its normalisation and skip connection, to tokens (B, T, D)."""
    block: Any = find_blocks(target)[layer]
    update, scale = block.mlp(block.norm2(tokens)), layer_scale(block, "mlp")
    return tokens + (update if scale is None else update * scale)


def attention_module(target: TargetModel, block: int, kind: Features) -> nn.Module:
    """Return the module whose output `attention_features` returns."""
    blocks: Any = find_blocks(target)
    names = {"attention": "attn", "norm": "norm1"}
    if not hasattr(target.backbone, "blocks"):
        blocks = target.backbone.layers[-2].blocks
        names["attention"] = "drop_path1"  # `attn` returns separate windows, `drop_path1` the joined map
    return getattr(blocks[layer_index(target, block, blocks)], names[kind])


def attention_channels(target: TargetModel) -> int:
    """Return the number of channels of the maps that `attention_features` returns."""
    return target.backbone.feature_info[-1 if hasattr(target.backbone, "blocks") else -2]["num_chs"]


def attention_features(target: TargetModel, normalised: Tensor, block: int, kind: Features) -> Tensor:
    """Compute feature maps (B, height, width, channels) of an attention module, without prefix tokens (ViT-CX, 3.2).

    Args:
        target: a ViT, EVA or Swin.
        normalised: normalised images, (B, C, H, W).
        block: index of the block, for Swin in the second-to-last stage; negative from the end.
        kind: `attention` for the output of the module (the paper), `norm` for its normalised input (the released code).
    """
    outputs: list[Tensor] = []
    hook = attention_module(target, block, kind).register_forward_hook(lambda *call: outputs.append(call[-1]))
    try:
        target.backbone.forward_features(normalised)
    finally:
        hook.remove()
    if outputs[0].dim() == 4:
        return outputs[0]
    tokens = outputs[0][:, target.backbone.num_prefix_tokens :]
    return tokens.unflatten(1, map_shape(tokens.shape[1], normalised.shape[-2:]))
