"""Direct paths: what the attention of a block moves from a patch into the tokens that the embedding reads.

A transformer adds the outputs of its attention and MLPs to its tokens, so the embedding is a sum over blocks, and the
part of attention is a sum over the tokens that are attended to (Elhage et al., 2021, call it the direct path). With the
scale of the final normalisation taken as a constant, the part of patch z in block l is a vector r_zl, and v · r_zl is
its share of any linear functional v of the embedding. Nothing is trained, and no backward pass is needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from explainers.errors import InputError
from explainers.target import TargetModel
from explainers.transformer.blocks import blocks_of, head_projections, num_prefix_tokens, readout


class DirectRecord(TorchFunctionMode):
    """Records attention in some blocks during one forward pass; made by `direct_paths`."""

    def __init__(self, target: TargetModel, blocks: Sequence[int]) -> None:
        super().__init__()
        self.target, self.blocks = target, tuple(blocks)
        self.recording = False
        self.attention: list[Tensor] = []
        self.values: list[Tensor] = []
        self.final = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self.recording:
            self._record(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def enter_block(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Begin to record (a forward pre-hook)."""
        self.recording = True

    def leave_block(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """End to record (a forward hook)."""
        self.recording = False

    def enter_norm(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Record the output of the last block (a forward pre-hook of the final normalisation)."""
        self.final = args[0].detach()

    def paths(self) -> Tensor:
        """Compute r_zl of all patches z and recorded blocks l: (B, L, N, D).

        Raises:
            InputError: if nothing was recorded.
        """
        if len(self.attention) != len(self.blocks):
            raise InputError(
                f"expected one forward pass with fused attention in the blocks {list(self.blocks)} of"
                f" {self.target.name}, recorded {len(self.attention)}: embed images once inside the context"
            )
        backbone, prefix = self.target.backbone, num_prefix_tokens(self.target)
        weights = readout(self.target, self.final.shape[1])
        tokens, weights = self.final[:, weights > 0].float(), weights[weights > 0]  # the R tokens that are read
        rows = weights * inverse_scale(backbone.norm, tokens)  # (B, R)
        pooled_norm = getattr(backbone, "fc_norm", nn.Identity())
        if isinstance(pooled_norm, nn.LayerNorm):
            pooled = (weights[:, None] * backbone.norm(tokens).float()).sum(1)
            rows = rows * inverse_scale(pooled_norm, pooled)[:, None]
        found = []
        for layer, attention, values in zip(self.blocks, self.attention, self.values, strict=True):
            row = torch.einsum("br,bhrt->bht", rows.to(attention.dtype), attention)[..., prefix:]
            carried = values[:, :, prefix:].transpose(1, 2) * row.mT[..., None]  # (B, N, A, d)
            projection = head_projections(self.target, layer).movedim(0, -1)  # (A, d, D)
            projection = through(pooled_norm, through(backbone.norm, projection)).to(carried.dtype)
            found.append(carried.flatten(2) @ projection.flatten(0, 1))
        return torch.stack(found, 1)

    def _record(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> None:
        read = readout(self.target, q.shape[2]) > 0
        scores = (q[:, :, read] * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
        if attn_mask is not None:
            scores = scores + attn_mask[..., read, :]
        self.attention.append(scores.float().softmax(-1).to(v.dtype).detach())
        self.values.append(v.detach())


@contextmanager
def direct_paths(target: TargetModel, blocks: Sequence[int]) -> Iterator[DirectRecord]:
    """Record the direct paths of some blocks in a forward pass that runs inside this context.

    Args:
        target: a timm transformer with a class token or average pooling.
        blocks: indices of the blocks, in ascending order.

    Raises:
        InputError: for models without such blocks, or with another readout.

    >>> import timm
    >>> target = TargetModel(timm.create_model("test_vit", num_classes=2)).eval()
    >>> with torch.no_grad(), direct_paths(target, [4, 5]) as record:
    ...     embeddings = target.embed(torch.rand(1, 3, 160, 160))
    >>> record.paths().shape
    torch.Size([1, 2, 100, 64])
    """
    check_direct(target, blocks)
    record = DirectRecord(target, blocks)
    layers: list[Any] = blocks_of(target)
    with ExitStack() as stack:
        for block in (layers[index] for index in blocks):
            stack.callback(block.register_forward_pre_hook(record.enter_block).remove)
            stack.callback(block.register_forward_hook(record.leave_block).remove)
            stack.callback(setattr, block.attn, "fused_attn", block.attn.fused_attn)
            block.attn.fused_attn = True  # the one call that the mode sees
        stack.callback(target.backbone.norm.register_forward_pre_hook(record.enter_norm).remove)
        stack.enter_context(record)
        yield record


def check_direct(target: TargetModel, blocks: Sequence[int]) -> None:
    """Raise an InputError for a target whose direct paths are not known, or blocks that it does not have."""
    layers = blocks_of(target)
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
        raise InputError(
            f"expected one class token or average pooling, and LayerNorm before the head, got {target.name}: take"
            " another method, or direct=[] for AnyHead"
        )


def inverse_scale(norm: nn.Module, tokens: Tensor) -> Tensor:
    """Return what a normalisation multiplies tokens (..., D) by, after it has taken their mean away: (...)."""
    if not isinstance(norm, nn.LayerNorm):
        return torch.ones_like(tokens[..., 0])
    return (tokens.var(-1, correction=0) + norm.eps).rsqrt()


def through(norm: nn.Module, parts: Tensor) -> Tensor:
    """Apply the linear rest of a normalisation, without scale and bias, to parts (..., D) of tokens."""
    if not isinstance(norm, nn.LayerNorm):
        return parts
    return (parts - parts.mean(-1, keepdim=True)) * norm.weight.detach().to(parts.dtype)
