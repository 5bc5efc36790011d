"""Flow of direct paths: what each patch adds to the embedding, also by way of MLPs and of other patches.

Direct paths (Elhage et al., 2021; see `direct_paths`) end where the attention of a block reaches the class token. Here
they go on, and start earlier. Like direct paths, they need no training and no backward pass, and hold for every linear
functional v of the embedding at once.

*MLP paths*: what block l adds to the class token also changes what later MLPs add. So r_lz = J_l Σ_h A^h_0z f_h(x_z),
where J_l is the Jacobian of the embedding with respect to the class token after the attention of block l, for constant
outputs of attention and scales of normalisations. v · r_lz is gradient times value.

*Flow* (as attention rollout and flow, Abnar & Zuidema, 2020): a patch token holds what attention moved to it from other
patches. So from the last block down to the first recorded one, attention moves a share of the vectors to these patches:

    rel_l = (1 − s_l) rel_{l+1} + Ā_lᵀ (s_l rel_{l+1}) + r_l,    s_lz = ‖o_lz‖ / (‖x_lz‖ + ‖o_lz‖)

for the input x_lz of patch token z, the output o_lz of its attention, and the attention Ā_l between patches, a mean
over heads. The share that a token got from the class token, or from registers, is left out, because it belongs to no
patch. AnyHead reads rel_l of L blocks; Σ_l v · rel_l is a heatmap.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from timm.layers import GELU, GELUTanh, Mlp
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.transformer.blocks import find_blocks, head_projections, layer_scale, num_prefix_tokens
from explainers.transformer.direct_paths import (
    check_direct,
    direct_paths,
    inverse_scale,
    project_into_embedding,
    read_rows,
    select_read_tokens,
)
from explainers.transformer.recording import Record, attach_record, attention_scores
from explainers.transformer.rules import Rules
from explainers.transformer.stage_paths import StageRecord, stage_paths, sum_stage_paths

Paths = Literal["direct", "flow", "stages"]
"""Which paths from patches to the embedding: direct ones, those that go on and start earlier, or those of stages."""


class FlowRecord(Record):
    """The record of a forward pass that `path_flow` needs, without gradients.

    Attributes:
        attention: attention weights of the R tokens that the embedding reads, (B, A, R, T), of each block.
        values: value vectors of each block, (B, A, T, d).
        class_tokens: the first token between attention and MLP, (B, D).
        transitions: diag(1 − s) + diag(s) Ā of each block but the last, (B, N, N).
        mlps: factors of the Jacobian of each block's MLP, see `linearise_mlps`.
    """

    def __init__(self, target: TargetModel, blocks: Sequence[int]) -> None:
        super().__init__(blocks, Rules(), attention=True, rows=select_read_tokens(target))
        self.prefix = num_prefix_tokens(target)
        self.class_tokens: list[Tensor] = []
        self.transitions: list[Tensor] = []
        self.mlps: list[tuple[Tensor, Tensor, Tensor]] = []
        self.tokens = self.between = torch.empty(0)  # of the running block: its input, and attention between patches

    def enter_block(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.tokens = args[0]
        return super().enter_block(module, args)

    def leave_attention(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        block, before, after = self.entered - 1, self.tokens.detach(), args[0].detach()
        if block in self.blocks:
            self.class_tokens.append(after[:, 0])
        if block in self.blocks[:-1]:
            patches = before[:, self.prefix :]
            self.transitions.append(transition(patches, after[:, self.prefix :] - patches, self.between))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
    ) -> Tensor:
        if self.rows is None or self.entered - 1 not in self.blocks[:-1]:
            return super()._attend(q, k, v, attn_mask, *args, **options)
        weights = attention_scores(q, k, attn_mask, options.get("scale")).softmax(-1).to(v.dtype)
        v = v.contiguous()  # once, for this product and for those of the paths
        constant = weights.detach()
        self.attention.append(constant[:, :, self.rows(q.shape[2])])
        self.values.append(v.detach())
        heads = constant[:, :, self.prefix :, self.prefix :].unbind(1)
        self.between = sum(heads[1:], heads[0]) / len(heads)
        return weights @ v


def transition(tokens: Tensor, update: Tensor, between: Tensor) -> Tensor:
    """Compute diag(1 − s) + diag(s) Ā: the share of each patch token (rows) that came from each (columns), (B, N, N).

    Of patch tokens x (B, N, D), their `update` o by attention, and the attention `between` patches, Ā (B, N, N).
    """
    size, added = (part.float().norm(dim=-1) for part in (tokens, update))
    share = added / (size + added)
    own = torch.diag_embed(1 - share)  # ONNX has no sums in place
    return between * share.to(between.dtype)[..., None] + own.to(between.dtype)


@contextmanager
def record_flow(target: TargetModel, blocks: Sequence[int]) -> Iterator[FlowRecord]:
    """Record what `path_flow` needs, during the one forward pass that runs inside this context; see `check_flow`.

    What is recorded has no graph, whether or not the pass has one.
    """
    check_flow(target, blocks)
    record = FlowRecord(target, blocks)
    with attach_record(record, target):
        yield record


def check_flow(target: TargetModel, blocks: Sequence[int]) -> None:
    """Raise an InputError if the target has no direct paths, or the blocks are none or not its last ones."""
    check_direct(target, blocks)
    count = len(find_blocks(target))
    last = list(range(count - max(1, len(blocks)), count))
    if list(blocks) != last:
        raise InputError(
            f"expected the last blocks of {target.name}, {last}, because paths flow through all of them,"
            f" got {list(blocks)}: give these, or paths=direct"
        )


@torch.no_grad()
def path_flow(target: TargetModel, record: FlowRecord, functionals: Tensor | None = None) -> Tensor:
    """Compute rel_l of all patches and the L recorded blocks l, (B, L, N, D), or v · rel_l, (B, L, N, V).

    V functionals v (B, V, D) cost about V / D of all of them.

    Models with average pooling, or with other MLPs than two linear layers around a GELU, have no MLP paths: their
    direct paths flow between patches. (A Jacobian for each token that is read would cost more than the forward pass.)
    """
    if has_mlp_paths(target, record.blocks):
        paths = mlp_paths(target, record, functionals)
    else:
        paths = list(direct_paths(target, record, functionals).unbind(1))
    flow = [paths[-1]]
    for path, matrix in zip(paths[-2::-1], record.transitions[::-1], strict=True):
        flow.append(torch.baddbmm(path, matrix.mT, flow[-1]))
    return torch.stack(flow[::-1], 1)


def read_paths(
    target: TargetModel,
    record: Record | StageRecord,
    functionals: Tensor | None = None,
) -> Tensor:
    """Compute the `path_flow` of a record of flow, the `stage_paths` of one of stages, or else the `direct_paths`."""
    if isinstance(record, StageRecord):
        return stage_paths(record, functionals)
    if isinstance(record, FlowRecord):
        return path_flow(target, record, functionals)
    return direct_paths(target, record, functionals)


def sum_paths(
    target: TargetModel,
    record: Record | StageRecord,
    patches: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute Σ_l w_lz p_lz for the paths p_l of some patches z, see `read_paths`, without those of the others.

    What reaches the class token is summed from the first recorded block to the last, and each MLP adds what it makes of
    the sum. So P vectors of an image take P vectors of work, where all paths take a Jacobian of D.

    Args:
        target: the recorded model.
        record: what `record_flow` or `record_direct` recorded.
        patches: their indices, (B, P); `None` for all.
        weights: w, (B, P, L); `None` for 1.

    Returns:
        (B, P, D).
    """
    if isinstance(record, StageRecord):
        return sum_stage_paths(record, patches, weights)
    flow = record if isinstance(record, FlowRecord) else None
    with torch.no_grad():  # gradients reach the weights w alone
        mlps = linearise_mlps(target, flow) if flow and has_mlp_paths(target, record.blocks) else []
        rows = [*read_rows(target, record)]
    dtype = record.values[0].dtype
    own = torch.eye(count_patches(target, record), dtype=dtype, device=record.final.device)
    own = own.expand(len(record.final), -1, -1) if patches is None else own[patches]
    share, total = torch.zeros_like(own), torch.zeros((), dtype=dtype)
    prefix = num_prefix_tokens(target)
    for i, row in enumerate(rows):
        share = share @ flow.transitions[i - 1].mT if flow and i else torch.zeros_like(own)
        share = share + (own if weights is None else own * weights[..., i, None].to(dtype))  # of each patch, (B, P, N)
        carried = record.values[i][:, :, prefix:].transpose(1, 2) * row.mT[..., None]  # (B, N, A, d)
        projection = head_projections(target, record.blocks[i]).flatten(1).to(dtype)
        total = total + share @ carried.flatten(2) @ projection.mT
        if mlps:
            write, slope, read = mlps[i]
            total = total + (total @ read.mT).mul_(slope[:, None]) @ write
    return project_into_embedding(target, total)


def prefer_sums(target: TargetModel, record: Record | StageRecord | None, patches: int, functionals: int) -> bool:
    """Whether `sum_paths` of all patches takes fewer operations than `read_paths` of some number of functionals.

    With MLP paths, each block multiplies M (9 D² + N D + N²) times: for the M = N patches of `sum_paths`, or for the
    functionals of `read_paths`; more than D functionals are read from M = D rows of a Jacobian. Without MLP paths there
    is nothing to save, and paths are not summed if heatmaps have another number of `patches` than the model.
    """
    return (
        isinstance(record, FlowRecord)
        and has_mlp_paths(target, record.blocks)
        and count_patches(target, record) == patches < min(functionals, target.embed_dim)
    )


def count_patches(target: TargetModel, record: Record | StageRecord) -> int:
    """The number of the model's own patches, from which recorded paths start."""
    if isinstance(record, StageRecord):
        return record.shares[0].shape[1]
    return record.values[0].shape[2] - num_prefix_tokens(target)


def has_mlp_paths(target: TargetModel, blocks: Sequence[int]) -> bool:
    """Whether the class token is read, and all blocks have MLPs whose Jacobian is known."""
    layers: list[Any] = [find_blocks(target)[block] for block in blocks]
    return getattr(target.backbone, "global_pool", "token") == "token" and all(
        isinstance(layer.mlp, Mlp)
        and isinstance(layer.mlp.act, nn.GELU | GELU | GELUTanh)
        and isinstance(layer.mlp.norm, nn.Identity)
        and isinstance(layer.norm2, nn.LayerNorm)
        for layer in layers
    )


@torch.no_grad()
def mlp_paths(target: TargetModel, record: FlowRecord, functionals: Tensor | None = None) -> list[Tensor]:
    """Compute r_lz = J_l Σ_h A^h_0z f_h(x_z) of all patches z, (B, N, D), or v · r_lz, (B, N, V), for each block l."""
    dtype, prefix = record.values[0].dtype, num_prefix_tokens(target)
    jacobian = project_into_embedding(target, torch.eye(target.embed_dim).to(record.final)).mT  # (D, D)
    jacobian = (jacobian if functionals is None else functionals.to(jacobian.dtype) @ jacobian).to(dtype)  # of v · G
    jacobian = jacobian.expand(len(record.final), -1, -1)
    mlps, rows = linearise_mlps(target, record), [*read_rows(target, record)]
    paths = []
    for i in range(len(record.blocks) - 1, -1, -1):
        write, slope, read = mlps[i]
        jacobian = jacobian + ((jacobian @ write.mT) * slope[:, None]) @ read
        of_heads = jacobian @ head_projections(target, record.blocks[i]).flatten(1).to(dtype)  # (B, V, A d)
        values = record.values[i][:, :, prefix:]
        if functionals is None:
            carried = values.transpose(1, 2) * rows[i].mT[..., None]  # (B, N, A, d)
            paths.append(carried.flatten(2) @ of_heads.mT)
        else:  # few numbers of each patch: no product is as wide as the values
            by_head = of_heads.unflatten(-1, (values.shape[1], -1)).movedim(1, -1)  # (B, A, d, V)
            paths.append(((values @ by_head) * rows[i][..., None]).sum(1))
    return paths[::-1]


def linearise_mlps(target: TargetModel, record: FlowRecord) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Compute the factors of `linearise_mlp` of all recorded blocks, once for each record."""
    if not record.mlps:
        blocks, dtype = find_blocks(target), record.values[0].dtype
        for block, tokens in zip(record.blocks, record.class_tokens, strict=True):
            record.mlps.append(linearise_mlp(blocks[block], tokens, dtype))
    return record.mlps


def linearise_mlp(block: Any, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the factors of the Jacobian writeᵀ · diag(slope) · read of a block's MLP at `tokens` (B, D).

    Returns:
        write (C, D), slope (B, C) and read (C, D), of C hidden channels.
    """
    mlp, factors = block.mlp, layer_scale(block, "mlp")
    hidden = mlp.fc1(block.norm2(tokens))
    approximate = getattr(mlp.act, "approximate", "tanh" if isinstance(mlp.act, GELUTanh) else "none")
    slope = torch.ops.aten.gelu_backward(torch.ones_like(hidden), hidden, approximate=approximate)
    slope = slope * inverse_scale(block.norm2, tokens.float())[:, None]
    read, write = mlp.fc1.weight.detach() * block.norm2.weight.detach(), mlp.fc2.weight.detach().mT
    read = read - read.mean(-1, keepdim=True)  # the normalisation centres its input
    write = write if factors is None else write * factors
    return write.to(dtype), slope.to(dtype), read.to(dtype)
