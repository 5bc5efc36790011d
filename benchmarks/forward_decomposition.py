"""DecompX and GlobEnc by tensors of T × T × D, which `explainers.posthoc` avoids; for `benchmarks/posthoc.py`.

For plain ViTs of timm with a class token. Vectorised, one image at a time, without gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.masking import PatchGrid, map_shape
from explainers.models import TargetModel
from explainers.posthoc.white_box import sum_on_grid
from explainers.transformer.blocks import find_blocks, num_prefix_tokens


@torch.no_grad()
def decompx_skip_plus(target: TargetModel, grid: PatchGrid, images: Tensor, classes: Tensor) -> Tensor:
    """DecompX of the logit, summed over the start layers ⌈L/2⌉ ... L − 1, as both papers define it.

    From each start layer on, a tensor a (T, T + 1, D) goes through all later layers (Modarressi et al., 2023): a[i, j]
    is the contribution of token j of the start layer to token i, and a[i, T] is the contribution of the biases.
    """
    heatmaps = []
    layers = len(find_blocks(target))
    for image, label in zip(images, classes.tolist(), strict=True):
        inputs, attention = record(target, image)
        v = target.head.weight[label]
        starts = range(-(-layers // 2), layers)
        sources = torch.stack([decompose(target, inputs, attention, start) @ v for start in starts]).sum(0)
        patches = sources[num_prefix_tokens(target) : -1]
        heatmaps.append(sum_on_grid(patches.unflatten(0, map_shape(len(patches), grid.shape)), grid.shape))
    return torch.stack(heatmaps).float()


def record(target: TargetModel, image: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The tokens (T, D) that enter each block, and its attention weights (A, T, T)."""
    backbone = target.backbone
    inputs: list[Tensor] = []
    attention: list[Tensor] = []
    tokens = backbone.norm_pre(backbone._pos_embed(backbone.patch_embed(target.normalise(image[None]))))
    for block in backbone.blocks:
        q, k, _ = block.attn.qkv(block.norm1(tokens))[0].unflatten(-1, (3, block.attn.num_heads, -1)).unbind(1)
        attention.append(torch.einsum("ihd,jhd->hij", q * block.attn.scale, k).softmax(-1))
        inputs.append(tokens[0])
        tokens = block(tokens)
    return inputs, attention


def decompose(target: TargetModel, inputs: list[Tensor], attention: list[Tensor], start: int) -> Tensor:
    """Contributions to the embedding of each token that enters block `start`, and of all biases: (T + 1, D)."""
    tokens = inputs[start]
    parts = tokens.new_zeros(len(tokens), len(tokens) + 1, tokens.shape[-1])
    parts.diagonal().copy_(tokens.mT)
    for block, weights in list(zip(find_blocks(target), attention, strict=True))[start:]:
        parts = through_block(block, parts, weights)
    return normalise(target.backbone.norm, parts[:1])[0]  # of the class token


def through_block(block: Any, parts: Tensor, attention: Tensor) -> Tensor:
    """The parts (T, T + 1, D) after a block, for attention weights (A, T, T)."""
    width = parts.shape[-1]
    qkv = block.attn.qkv
    values = linear(normalise(block.norm1, parts), qkv.weight[-width:], qkv.bias[-width:])
    values = values.unflatten(-1, (len(attention), -1))
    mixed = torch.einsum("hij,jshd->ishd", attention, values).flatten(2)
    parts = parts + linear(mixed, block.attn.proj.weight, block.attn.proj.bias)
    hidden = linear(normalise(block.norm2, parts), block.mlp.fc1.weight, block.mlp.fc1.bias)
    total = hidden.sum(1, keepdim=True, dtype=torch.float)
    ratio = torch.where(total.abs() < 1e-6, 0.5, block.mlp.act(total) / total)
    return parts + linear(hidden * ratio, block.mlp.fc2.weight, block.mlp.fc2.bias)


def normalise(norm: Any, parts: Tensor) -> Tensor:
    """LayerNorm of parts (..., T + 1, D), with the standard deviation of their sum."""
    deviation = (parts.sum(-2).var(-1, correction=0) + norm.eps).sqrt()
    scaled = (parts - parts.mean(-1, keepdim=True)) * (norm.weight / deviation[..., None, None])
    scaled[..., -1, :] += norm.bias
    return scaled


def linear(parts: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer of parts (..., T + 1, D); the last of them gets the bias."""
    y = F.linear(parts, weight)
    y[..., -1, :] += bias
    return y


def contribution_norms(attention: Tensor, paths: Tensor, tokens: Tensor) -> Tensor:
    """The norms of GlobEnc, from vectors (B, T, T, D)."""
    parts = torch.einsum("bhij,bhjd->bijd", attention, paths)
    parts.diagonal(dim1=1, dim2=2).add_(tokens.mT)
    return parts.norm(dim=-1)
