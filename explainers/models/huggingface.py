"""Vision transformers of Hugging Face transformers as models of timm.

Nothing here imports transformers: the attributes of a given model are read.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import timm.data
import torch
from timm.layers import LayerNorm
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.masking import read_size
from explainers.models.dinov2_hub import finish_dinov2
from explainers.models.heads import DistilledHead, TextProjection
from explainers.models.huggingface_stages import map_convnext, map_hiera, map_resnet
from explainers.models.mapping import (
    Inputs,
    Mapped,
    Plan,
    Table,
    Weights,
    class_and_patches,
    join_weights,
    linear_part,
    rename_weights,
)
from explainers.models.preprocessing import guess_transform
from explainers.models.probes import Unmapped
from explainers.models.scores import Score

FIRST_TOKEN = ("vit", "deit")
"""Families whose own pooled output is another than the embedding that their heads read: the class token."""

PROBLEMS: dict[str | None, Score] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "value",
}
"""`problem_type` of a config → what the outputs mean."""


def plan(model: Any, inputs: Inputs) -> Plan:
    """Plan how a model of transformers becomes a model of timm; `Unmapped` if timm has no such architecture.

    For images of another size than the model's own, positions are interpolated as the model itself does it.
    """
    family, name = _find_family(model), type(model).__name__
    if family not in FAMILIES or "MaskedImageModeling" in name or name.endswith("Backbone"):
        raise Unmapped(f"only models of {', '.join(FAMILIES)} of transformers that classify or embed are converted")
    config = getattr(model.config, "vision_config", model.config)
    size = inputs.size
    own = find_image_size(config) or size
    if own is None or size is None or config.num_channels != 3:
        raise Unmapped("the size of its images is not known, or they are not of three channels")
    weights = model.state_dict() if size == own else _resize_positions(model, size, config.patch_size)
    try:
        mapped = FAMILIES[family][0](model, config, weights, size)
    except (AttributeError, KeyError) as error:
        raise Unmapped(f"it is not built as the {family} of transformers that is known here ({error})") from error
    outputs = partial(_outputs, family=family, interpolates=size != own)
    pool = class_and_patches if family.startswith("dinov2") and hasattr(model, "classifier") else None
    on_the_hub = str(getattr(model.config, "_name_or_path", "") or name).rstrip("/").rpartition("/")[2]
    return Plan(on_the_hub, *mapped, _head(model), outputs, inputs, pool)


def is_model(module: nn.Module) -> bool:
    """Whether a module of transformers is a whole model of images."""
    return getattr(module, "main_input_name", None) == "pixel_values"


def find_inputs(model: Any, weights: Any = None, size: tuple[int, int] | None = None) -> Inputs:
    """Return the images that a model of transformers takes, as far as its family says it.

    An InputError refuses weights, because the model has its own, and a model that embeds texts too.
    """
    family = _find_family(model)
    if weights is not None:
        raise InputError("expected weights for the name of a timm model, got a model of transformers: drop weights")
    if hasattr(model, "timm_model"):
        return _find_wrapped_inputs(model, size)
    if hasattr(model, "vision_model") and hasattr(model, "text_model"):
        raise InputError(
            f"expected a model of images, got {type(model).__name__}, which embeds texts too: give model.vision_model"
        )
    mean, std = FAMILIES[family][1] if family in FAMILIES else (None, None)
    size = size or find_image_size(getattr(model.config, "vision_config", model.config))
    size = size or ((224, 224) if family == "resnet" else None)  # which has no size of its own
    classifies = hasattr(model, "classifier") or hasattr(model, "cls_classifier")
    classes = class_names(model.config) if classifies else []
    transform = guess_transform(family, size) if size else None
    origin = f"those of the usual image processor of {family}"
    return Inputs(size, mean, std, origin, classes, transform, find_score(model.config))


def _find_wrapped_inputs(model: Any, size: tuple[int, int] | None) -> Inputs:
    """Return the images that a timm model inside a model of transformers takes, as its config states them."""
    stated = model.config.pretrained_cfg or {}
    classes = class_names(model.config) if type(model).__name__.endswith("ForImageClassification") else []
    transform = None
    if stated:
        data = timm.data.resolve_data_config(pretrained_cfg=stated)
        size = size or data["input_size"][1:]
        transform = ImageTransform.from_timm(data, size)
    score = find_score(model.config)
    return Inputs(size, stated.get("mean"), stated.get("std"), "those of its config", classes, transform, score)


def _find_family(model: Any) -> str:
    """Return the folder in transformers that a model's class is from, such as `vit`."""
    parts = type(model).__module__.split(".")
    return parts[2] if len(parts) > 2 else ""


def find_image_size(config: Any) -> tuple[int, int] | None:
    """Return height and width of a model's images in pixels; None if they are not known."""
    size = getattr(config, "image_size", None)
    if size is None and hasattr(config, "num_patches"):  # SigLIP 2, which takes other grids, too
        size = isqrt(config.num_patches) * config.patch_size
    return None if size is None else read_size(size)


def find_score(config: Any) -> Score | None:
    """Return what a config says of the outputs; None if it says nothing. A single output is a regression there."""
    return PROBLEMS.get(getattr(config, "problem_type", None)) or ("value" if config.num_labels == 1 else None)


def class_names(config: Any) -> list[str]:
    """Return the names of the classes, or none if transformers made them up: LABEL_0, LABEL_1 ..."""
    names = [name for _, name in sorted((int(index), str(name)) for index, name in config.id2label.items())]
    return [] if names == [f"LABEL_{index}" for index in range(len(names))] else names


def _head(model: Any) -> nn.Module | None:
    """Return the layer from embeddings to outputs; None for a model that embeds."""
    if hasattr(model, "distillation_classifier"):
        return DistilledHead(model.cls_classifier, model.distillation_classifier)
    if hasattr(model, "visual_projection"):
        return TextProjection(model.visual_projection.weight.detach())
    return linear_part(model.classifier) if hasattr(model, "classifier") else None


def _resize_positions(model: Any, size: tuple[int, int], patch_size: int) -> Weights:
    """Return the weights of a model whose positions (1, T, D) or (T, D) it interpolates for images of another size."""
    weights: Weights = model.state_dict()
    name = next((name for name in weights if re.search(r"position_embeddings?(\.weight)?$", name)), None)
    if name is None:
        return weights
    part = next((part for part in model.modules() if hasattr(part, "interpolate_pos_encoding")), None)
    if part is None:
        raise Unmapped("it cannot interpolate its positions")
    own = find_image_size(getattr(model.config, "vision_config", model.config)) or (0, 0)
    before, after = ((height // patch_size) * (width // patch_size) for height, width in (own, size))
    tokens = weights[name].new_zeros(1, weights[name].shape[-2] - before + after, weights[name].shape[-1])
    with torch.no_grad():
        positions = part.interpolate_pos_encoding(tokens, *size)
    return {**weights, name: positions.reshape(*weights[name].shape[:-2], *positions.shape[-2:])}


def _outputs(model: Any, images: Tensor, family: str, interpolates: bool) -> Tensor:
    """Compute logits (B, K) of normalised images, or embeddings (B, D) if the model has no head."""
    if family == "siglip2":
        outputs = model(**_cut_patches(images, getattr(model.config, "vision_config", model.config).patch_size))
    else:
        accepts = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        outputs = model(pixel_values=images, **({"interpolate_pos_encoding": True} if interpolates and accepts else {}))
    for name in ("logits", "image_embeds"):
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
    pooled: Tensor | None = outputs.last_hidden_state[:, 0] if family in FIRST_TOKEN else outputs.pooler_output
    if pooled is None:
        raise Unmapped("it was built without pooling, and therefore has no embedding")
    return pooled.flatten(1)  # of ResNet, maps of one pixel


def _cut_patches(images: Tensor, patch_size: int) -> dict[str, Tensor]:
    """Cut images (B, C, H, W) into the patches that SigLIP 2 takes: (B, N, patch_size² C), none of them padding."""
    patches = images.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)
    shape = torch.tensor(patches.shape[2:4]).expand(len(images), 2)
    patches = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    mask = torch.ones(patches.shape[:2], dtype=torch.long, device=images.device)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shape}


OUTSIDE: Table = (
    (r"^(classifier|cls_classifier|distillation_classifier|visual_projection)\.", None),
    (r"^(vit|deit|dinov2|dinov2_with_registers|dinov3_vit|beit|swin|vision_model)\.", ""),
)
COMMON: Table = (
    (r"(^|\.)(mask_token|position_ids|relative_position_index)$", None),
    (r"^pooler\.dense\.", None),
    (r"embeddings\.norm\.", "patch_embed.norm."),
    (r"^(embeddings|encoder)\.", ""),
    (r"^patch_embeddings?\.(projection\.)?", "patch_embed.proj."),
    (r"^position_embeddings?(\.weight)?$", "pos_embed"),
    (r"^class_embedding$", "cls_token"),
    (r"^register_tokens$", "reg_token"),
    (r"^(layernorm|post_layernorm)\.", "norm."),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^pooler\.layernorm\.", "fc_norm."),
    # Inside of a block
    (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
    (r"\.(?:attention\.attention|attention\.self|attention|self_attn)\.(q|k|v)(?:uery|ey|alue|_proj)\.", r".attn.\1."),
    (r"\.(attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.", ".attn.proj."),
    (r"\.(intermediate\.dense|mlp\.weights_in)\.", ".mlp.fc1."),
    (r"\.(output\.dense|mlp\.weights_out|mlp\.down_proj)\.", ".mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.lambda_(\d)$", r".gamma_\1"),
    (r"^((?:layers?\.\d+\.)?(?:blocks|layers?)\.\d+)\..*relative_position_bias_table$", r"\1.attn.table"),
    (r"^(shared_position_bias|relative_position_bias)\.relative_position_bias_table$", "rel_pos_bias.table"),
    (r"\.table$", ".relative_position_bias_table"),
)
BLOCKS: Table = ((r"^layers?\.", "blocks."),)
DINOV3: Table = (
    (r"^model\.layer\.", "blocks."),
    (r"\.attn\.(q|v)\.bias$", r".attn.\1_bias"),
    (r"\.ls(\d)\.gamma$", r".gamma_\1"),
)
SWIN: Table = ((r"^layers\.(\d+)\.downsample\.", lambda found: f"layers.{int(found[1]) + 1}.downsample."),)
SIGLIP: Table = (
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.in_proj_(\w+)$", r"attn_pool.qkv.\1"),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.", "attn_pool."),
)

ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Name of an activation in transformers → in timm."""

HALF = timm.data.IMAGENET_INCEPTION_MEAN, timm.data.IMAGENET_INCEPTION_STD
IMAGENET = timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD
CLIP = timm.data.OPENAI_CLIP_MEAN, timm.data.OPENAI_CLIP_STD


def _vit(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    named = _blocks(weights, BLOCKS)
    return "vit_base_patch16_224", _sizes(config, named, size), named


def _deit(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    distilled = hasattr(model, "distillation_classifier")
    token = "dist_token" if distilled else "reg_token"  # without a head of its own, the token is a register
    named = _blocks(weights, (*BLOCKS, (r"^distillation_token$", token)))
    sizes = _sizes(config, named, size)
    if distilled:
        return "deit_base_distilled_patch16_224", sizes, named
    return "vit_base_patch16_224", sizes | {"reg_tokens": 1}, named


def _dinov2(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    named = join_weights(_blocks(weights, BLOCKS), ("mlp.gate_proj", "mlp.up_proj"), "mlp.fc1")
    sizes = _sizes(config, named, size) | {"init_values": 1.0}
    return finish_dinov2(sizes, named, getattr(config, "use_swiglu_ffn", False))


def _dinov3(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    named = _blocks({name: weight for name, weight in weights.items() if weight.numel()}, DINOV3)
    named = join_weights(named, ("mlp.gate_proj", "mlp.up_proj"), "mlp.fc1")
    named = rename_weights(named, [(r"\.mlp\.up_proj\.", ".mlp.fc1.")])  # without gates
    sizes = _sizes(config, named, size) | {
        "mlp_ratio": (config.intermediate_size + 0.5) / config.hidden_size,
        "qkv_bias": "blocks.0.attn.q_bias" in named,
        "swiglu_mlp": config.use_gated_mlp,
        "num_reg_tokens": config.num_register_tokens,
        "rope_temperature": config.rope_theta,
        "global_pool": "token",
    }
    if sizes.pop("act_layer") != ("silu" if config.use_gated_mlp else "gelu"):
        raise Unmapped(f"timm's DINOv3 has no activation {config.hidden_act}")
    return "vit_small_patch16_dinov3", sizes, named


def _clip(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    named = _blocks(weights, BLOCKS)
    named |= {"cls_token": named["cls_token"].reshape(1, 1, -1), "pos_embed": named["pos_embed"][None]}
    sizes = _sizes(config, named, size) | {"pre_norm": True}
    if hasattr(model, "classifier"):  # it averages the patches before the last normalisation
        named = {name: weight for name, weight in named.items() if not name.startswith("norm.")}
        sizes |= {"global_pool": "avg", "final_norm": False}
    return "vit_base_patch16_clip_224", sizes, named


def _siglip(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    named = _blocks(rename_weights(rename_weights(weights, OUTSIDE), SIGLIP), BLOCKS)
    named |= {"pos_embed": named["pos_embed"][None]}
    if named["patch_embed.proj.weight"].dim() == 2:  # of SigLIP 2, which takes patches
        patches = named["patch_embed.proj.weight"].unflatten(1, (config.patch_size, config.patch_size, -1))
        named |= {"patch_embed.proj.weight": patches.permute(0, 3, 1, 2)}
    sizes = _sizes(config, named, size) | {"class_token": False}
    if hasattr(model, "classifier"):  # it averages the patches
        named = {name: weight for name, weight in named.items() if not name.startswith("attn_pool.")}
        return "vit_base_patch16_siglip_224", sizes | {"global_pool": "avg", "fc_norm": False}, named
    if "attn_pool.latent" not in named:
        raise Unmapped("it has no pooling, and therefore no embedding")
    for kind in ("weight", "bias"):
        query, *key_value = named.pop(f"attn_pool.qkv.{kind}").chunk(3)
        named |= {f"attn_pool.q.{kind}": query, f"attn_pool.kv.{kind}": torch.cat(key_value)}
    return "vit_base_patch16_siglip_224", sizes | {"global_pool": "map"}, named


def _beit(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    named = _blocks(weights, (*BLOCKS, (r"\.attn\.(q|v)\.bias$", r".attn.\1_bias")))
    sizes = _sizes(config, named, size)
    if sizes.pop("act_layer") != "gelu":
        raise Unmapped(f"timm's BEiT has no activation {config.hidden_act}")
    sizes |= {
        "qkv_bias": "blocks.0.attn.q_bias" in named,
        "init_values": config.layer_scale_init_value,
        "use_abs_pos_emb": config.use_absolute_position_embeddings,
        "use_rel_pos_bias": config.use_relative_position_bias,
        "use_shared_rel_pos_bias": config.use_shared_relative_position_bias,
        "global_pool": "avg" if config.use_mean_pooling else "token",
    }
    return "beit_base_patch16_224", sizes, named


def _swin(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    if config.hidden_act != "gelu":
        raise Unmapped(f"timm's Swin has no activation {config.hidden_act}")
    sizes = {
        "img_size": size,
        "patch_size": config.patch_size,
        "embed_dim": config.embed_dim,
        "depths": tuple(config.depths),
        "num_heads": tuple(config.num_heads),
        "window_size": config.window_size,
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "norm_layer": partial(nn.LayerNorm, eps=config.layer_norm_eps),
    }
    return "swin_tiny_patch4_window7_224", sizes, _blocks(weights, SWIN)


FAMILIES: dict[str, tuple[Callable[..., Mapped], tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "vit": (_vit, HALF),
    "deit": (_deit, IMAGENET),
    "dinov2": (_dinov2, IMAGENET),
    "dinov2_with_registers": (_dinov2, IMAGENET),
    "beit": (_beit, HALF),
    "swin": (_swin, IMAGENET),
    "clip": (_clip, CLIP),
    "siglip": (_siglip, HALF),
    "siglip2": (_siglip, HALF),
    "dinov3_vit": (_dinov3, IMAGENET),
    "convnext": (map_convnext, IMAGENET),
    "convnextv2": (map_convnext, IMAGENET),
    "resnet": (map_resnet, IMAGENET),
    "hiera": (map_hiera, IMAGENET),
}
"""Folder of a model in transformers → function that maps it; mean and deviation of its usual image processor."""


def _blocks(weights: Weights, table: Table) -> Weights:
    """Rename the weights of a transformer, and join queries, keys and values."""
    named = rename_weights(weights, (*OUTSIDE, *COMMON, *table))
    return join_weights(named, ("attn.q", "attn.k", "attn.v"), "attn.qkv")


def _sizes(config: Any, named: Weights, size: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of timm's ViT and BEiT that a config of transformers states."""
    if config.hidden_act not in ACTIVATIONS:
        raise Unmapped(f"timm has no activation {config.hidden_act}")
    hidden = len(named["blocks.0.mlp.fc1.weight"])
    return {
        "img_size": size,
        "patch_size": config.patch_size,
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": (hidden + 0.5) / config.hidden_size,  # timm rounds the product with the width down
        "qkv_bias": "blocks.0.attn.qkv.bias" in named,
        "norm_layer": partial(LayerNorm, eps=config.layer_norm_eps),
        "act_layer": ACTIVATIONS[config.hidden_act],
    }
