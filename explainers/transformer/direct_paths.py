"""Direct paths: what the attention of a block adds from a patch to the tokens that the embedding reads.

A transformer adds the outputs of its attention and MLPs to its tokens. So the embedding is a sum over blocks, and each
block's attention contributes a sum over the tokens it attends to: their direct paths (Elhage et al., 2021). If the
scale of the final normalisation is a constant, patch z contributes a vector r_zl through block l, and v · r_zl to any
linear functional v of the embedding. Direct paths need neither training nor a backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from explainers.errors import InputError, UnsupportedModel
from explainers.models import TargetModel
from explainers.transformer.blocks import find_blocks, head_projections, num_prefix_tokens, readout
from explainers.transformer.recording import Record, attach_record
from explainers.transformer.rules import Rules


@contextmanager
def record_direct(target: TargetModel, blocks: Sequence[int]) -> Iterator[Record]:
    """Record the attention that `direct_paths` needs, during the forward pass that runs inside this context.

    The record holds attention rows of the tokens that the embedding reads, and values, without gradients. An InputError
    says what `check_direct` finds, and unless exactly one forward pass ran inside.
    """
    check_direct(target, blocks)
    record = Record(blocks, Rules(), attention=True, rows=select_read_tokens(target))
    with attach_record(record, target):
        yield record


def select_read_tokens(target: TargetModel) -> Callable[[int], Tensor]:
    """Return a function of the number T of tokens → which of them the embedding reads, boolean (T,)."""
    return lambda num_tokens: readout(target, num_tokens) > 0


@torch.no_grad()
def direct_paths(target: TargetModel, record: Record, functionals: Tensor | None = None) -> Tensor:
    """Compute r_zl of all patches z and the L recorded blocks l, (B, L, N, D), or v · r_zl, (B, L, N, V).

    Args:
        target: the recorded model.
        record: what `record_direct` recorded.
        functionals: v, (B, V, D).
    """
    prefix = num_prefix_tokens(target)
    paths = []
    for layer, row, values in zip(record.blocks, read_rows(target, record), record.values, strict=True):
        carried = values[:, :, prefix:].transpose(1, 2) * row.mT[..., None]  # (B, N, A, d)
        projection = head_projections(target, layer).movedim(0, -1)  # (A, d, D)
        written = project_into_embedding(target, projection).to(carried.dtype).flatten(0, 1)
        written = written if functionals is None else written @ functionals.mT.to(carried.dtype)
        paths.append(carried.flatten(2) @ written)
    return torch.stack(paths, 1)


def read_rows(target: TargetModel, record: Record) -> Iterator[Tensor]:
    """Compute Σ_r w_r A^h_rz of each recorded block, (B, A, N): how much of the value of patch z the embedding reads.

    It reads tokens r with the weights w_r of `read_factors`. The arguments are those of `direct_paths`.
    """
    prefix = num_prefix_tokens(target)
    factors = read_factors(target, record.final)
    for attention in record.attention:
        yield torch.einsum("br,bhrt->bht", factors.to(attention.dtype), attention)[..., prefix:]


def check_direct(target: TargetModel, blocks: Sequence[int]) -> None:
    """Raise an InputError if the target has no direct paths, or lacks one of the blocks."""
    layers = find_blocks(target)
    if list(blocks) != sorted(set(blocks)) or not all(0 <= block < len(layers) for block in blocks):
        raise InputError(
            f"expected direct paths of blocks from 0 to {len(layers) - 1} of {target.name}, in ascending order, got"
            f" {list(blocks)}"
        )
    readout(target, 1 + num_prefix_tokens(target))
    for block in blocks:
        head_projections(target, block)
    norms = [target.backbone.norm, getattr(target.backbone, "fc_norm", nn.Identity())]
    if target.distilled or not all(isinstance(norm, nn.LayerNorm | nn.Identity) for norm in norms):
        raise UnsupportedModel(
            "one class token or average pooling, and LayerNorm before the head",
            target.name,
            "another method, or direct=[] for AnyHead",
        )


def default_direct(target: TargetModel) -> list[int]:
    """Return the blocks whose paths AnyHead adds by default: all but the first third; none without paths."""
    with suppress(InputError):
        count = len(find_blocks(target))
        blocks = list(range(count // 3, count))
        check_direct(target, blocks)
        return blocks
    return []


def read_factors(target: TargetModel, final: Tensor) -> Tensor:
    """Return the weight of each token that the embedding reads, after the scales of the final normalisations: (B, R).

    `final` is the output of the last block, (B, T, D).
    """
    weights = readout(target, final.shape[1])
    tokens, weights = final[:, weights > 0].float(), weights[weights > 0]
    rows = weights * inverse_scale(target.backbone.norm, tokens)
    pooled_norm = getattr(target.backbone, "fc_norm", nn.Identity())
    if isinstance(pooled_norm, nn.LayerNorm):
        pooled = (weights[:, None] * target.backbone.norm(tokens).float()).sum(1)
        rows = rows * inverse_scale(pooled_norm, pooled)[:, None]
    return rows


def project_into_embedding(target: TargetModel, parts: Tensor) -> Tensor:
    """Apply the linear part of the final normalisations to parts (..., D) of an output token."""
    return apply_linear_part(
        getattr(target.backbone, "fc_norm", nn.Identity()), apply_linear_part(target.backbone.norm, parts)
    )


def inverse_scale(norm: nn.Module, tokens: Tensor) -> Tensor:
    """Return the factor by which a normalisation multiplies the centred tokens (..., D), before its weight: (...)."""
    if not isinstance(norm, nn.LayerNorm):
        return torch.ones_like(tokens[..., 0])
    return (tokens.var(-1, correction=0) + norm.eps).rsqrt()


def apply_linear_part(norm: nn.Module, parts: Tensor) -> Tensor:
    """Apply the linear part of a normalisation, centring and weight, to parts (..., D) of tokens."""
    if not isinstance(norm, nn.LayerNorm):
        return parts
    return (parts - parts.mean(-1, keepdim=True)) * norm.weight.detach().to(parts.dtype)
