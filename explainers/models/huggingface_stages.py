"""ConvNeXt, ResNet and Hiera of Hugging Face transformers, whose maps shrink from stage to stage, as models of timm.

Swin, whose blocks are named as those of ViTs, is in `huggingface`.
"""

from itertools import accumulate
from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck

from explainers.models.mapping import Mapped, Table, Weights, rename_weights
from explainers.models.probes import Unmapped

CONVNEXT: Table = (
    (r"^classifier\.", None),
    (r"^convnext(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.", "stem.0."),
    (r"^embeddings\.layernorm\.", "stem.1."),
    (r"^layernorm\.", "head.norm."),
    (r"^encoder\.", ""),
    (r"\.downsampling_layer\.", ".downsample."),
    (r"\.layers\.", ".blocks."),
    (r"\.dwconv\.", ".conv_dw."),
    (r"\.layernorm\.", ".norm."),
    (r"\.pwconv(\d)\.", r".mlp.fc\1."),
    (r"\.grn\.", ".mlp.grn."),
    (r"\.layer_scale_parameter$", ".gamma"),
)
RESNET: Table = (
    (r"^classifier\.", None),
    (r"^resnet\.", ""),
    (r"^embedder\.embedder\.convolution\.", "conv1."),
    (r"^embedder\.embedder\.normalization\.", "bn1."),
    (r"^encoder\.stages\.(\d+)\.layers\.", lambda found: f"layer{int(found[1]) + 1}."),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
    (r"\.layer\.(\d)\.convolution\.", lambda found: f".conv{int(found[1]) + 1}."),
    (r"\.layer\.(\d)\.normalization\.", lambda found: f".bn{int(found[1]) + 1}."),
)
HIERA: Table = (
    (r"^classifier\.", None),
    (r"^hiera\.", ""),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^pooler\.layernorm\.", "head.norm."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
)


def map_convnext(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    """Map ConvNeXt, and ConvNeXt V2, which normalises responses and has no layer scale."""
    named = rename_weights(weights, CONVNEXT)
    named = {name: weight.flatten() if ".grn." in name else weight for name, weight in named.items()}
    sizes = {"depths": tuple(config.depths), "dims": tuple(config.hidden_sizes), "patch_size": config.patch_size}
    second_version = any(".grn." in name for name in named)
    return "convnextv2_tiny" if second_version else "convnext_tiny", sizes | {"act_layer": config.hidden_act}, named


def map_resnet(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    """Map a ResNet that shrinks maps where timm's do: by the 3 × 3 convolutions, from the second stage on."""
    if config.downsample_in_first_stage or config.downsample_in_bottleneck or config.hidden_act != "relu":
        raise Unmapped("timm's ResNets shrink maps elsewhere, or have another activation")
    block = Bottleneck if config.layer_type == "bottleneck" else BasicBlock
    return "resnet50", {"block": block, "layers": tuple(config.depths)}, rename_weights(weights, RESNET)


def map_hiera(model: Any, config: Any, weights: Weights, size: tuple[int, int]) -> Mapped:
    """Map Hiera; timm counts its blocks through all stages."""
    starts = [0, *accumulate(config.depths)]
    table: Table = (
        *HIERA,
        (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", lambda found: f"blocks.{starts[int(found[1])] + int(found[2])}."),
    )
    if config.hidden_act != "gelu" or any(config.num_heads[0] * 2**i != n for i, n in enumerate(config.num_heads)):
        raise Unmapped("timm's Hiera has GELU, and twice the heads in each stage")
    sizes = {
        "img_size": size,
        "embed_dim": config.embed_dim,
        "num_heads": config.num_heads[0],
        "stages": tuple(config.depths),
        "q_pool": config.num_query_pool,
        "q_stride": tuple(config.query_stride),
        "mask_unit_size": tuple(config.masked_unit_size),
        "mask_unit_attn": tuple(config.masked_unit_attention),
        "dim_mul": config.embed_dim_multiplier,
        "patch_kernel": tuple(config.patch_size),
        "patch_stride": tuple(config.patch_stride),
        "patch_padding": tuple(config.patch_padding),
        "mlp_ratio": config.mlp_ratio,
    }
    return "hiera_tiny_224", sizes, rename_weights(weights, table)
