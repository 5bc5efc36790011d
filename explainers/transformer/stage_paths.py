"""Paths from patches to the embedding of a model that averages its last feature map, such as a CNN or Swin.

Relative to a blank image, position p of the last map f, of P positions, adds c_p = (f_p − f⁰_p) / P to the embedding.
These vectors are exact: they sum to G(x) − G(blank), whatever the layers before them compute. But the last map is
coarse. So an earlier stage s says which of the patches z around a position changed it: those where its map F_s differs
most from that of the blank image.

    c_z = Σ_p w_zp c_p,    w_zp = u_zp a_z / Σ_z' u_z'p a_z',    a_z = ‖F_sz − F⁰_sz‖

u_zp are weights of bilinear interpolation. Every vector is shared out completely, so their sum does not change. Like
those of `direct_paths`, these paths need no training and no backward pass, and hold for every functional at once.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from explainers.errors import InputError, UnsupportedModel
from explainers.masking import map_shape, on_grid
from explainers.models import TargetModel

MOST = 600
"""Largest number of patches to which positions are shared out: those of the finest stage that has no more."""


@dataclass(frozen=True)
class StageRecord:
    """What one forward pass tells about the paths through L stages, without gradients.

    Attributes:
        vectors: c_p of the positions of the last map, (B, P, D).
        shares: w of each stage, divided by L, so that the paths of all stages sum to the vectors: (B, N, P) each.
    """

    vectors: Tensor
    shares: list[Tensor]


@torch.no_grad()
def record_stage_paths(
    target: TargetModel, normalised: Tensor, stages: Sequence[int], blocks: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor], StageRecord]:
    """Compute embeddings (B, D), the feature maps of `blocks`, and the record of `stages`, in one forward pass.

    A blank image, whose pixels are the means of the model's training, joins the batch.

    Args:
        target: a model for which `check_stage_paths` holds.
        normalised: images, (B, C, H, W).
        stages: indices of the stages that share out the vectors of the last map, see `TargetModel.embed_with_maps`.
        blocks: as of `TargetModel.embed_with_maps`.
    """
    read = sorted({*stages, *blocks})
    features, maps = target.read_maps(torch.cat([normalised, torch.zeros_like(normalised[:1])]), read)
    of = dict(zip(read, maps, strict=True))
    positions = target.positions(features).float()
    vectors = (positions[:-1] - positions[-1:]) / positions.shape[1]
    patches = max((of[stage].shape[1] for stage in stages if of[stage].shape[1] <= MOST), default=vectors.shape[1])
    shape = map_shape(patches, normalised.shape[-2:])
    shares = [share_out(of[stage][:-1] - of[stage][-1:], vectors.shape[1], shape) / len(stages) for stage in stages]
    return target.pool(features)[:-1], [of[block][:-1] for block in blocks], StageRecord(vectors, shares)


def share_out(changes: Tensor, positions: int, shape: tuple[int, int]) -> Tensor:
    """Compute w, (B, N, P), of P positions of the last map, for patches in rows and columns, `shape`.

    `changes` are F_s − F⁰_s, (B, N', C).

    >>> share_out(torch.tensor([[[1.0], [1.0], [3.0], [3.0]]]), positions=1, shape=(2, 2))[0, :, 0].tolist()
    [0.125, 0.125, 0.375, 0.375]
    """
    sizes = changes.float().norm(dim=-1, keepdim=True)
    around = on_grid(torch.eye(positions).to(changes)[None], shape)
    weights = around * on_grid(sizes, shape).clamp(min=1e-6 * sizes.mean() + 1e-30)
    return weights / weights.sum(1, keepdim=True)


def stage_paths(record: StageRecord, functionals: Tensor | None = None) -> Tensor:
    """Compute the paths of all patches through the L stages, (B, L, N, D), or v · paths, (B, L, N, V)."""
    values = record.vectors if functionals is None else record.vectors @ functionals.to(record.vectors.dtype).mT
    return torch.stack([share @ values for share in record.shares], 1)


def sum_stage_paths(record: StageRecord, patches: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Compute Σ_l w_lz p_lz for the paths p_l of some patches (B, P), or all, with weights w (B, P, L): (B, P, D)."""
    shares = torch.stack(record.shares, 2)  # (B, N, L, positions)
    if patches is not None:
        shares = shares[torch.arange(len(patches), device=patches.device)[:, None], patches]
    return (shares if weights is None else shares * weights[..., None]).sum(2) @ record.vectors


def check_stage_paths(target: TargetModel, stages: Sequence[int], size: tuple[int, int]) -> None:
    """Raise an InputError for a lack of these stages, or an embedding that is not the mean of the last map."""
    target.map_channels(stages)
    backbone = target.in_eval_mode().backbone  # so that statistics of batches stay as they are
    pooling = [getattr(part, "global_pool", None) for part in (backbone, getattr(backbone, "head", None))]
    with suppress(InputError):
        if "avg" in [getattr(each, "pool_type", each) for each in pooling]:
            blank = next(backbone.parameters()).new_zeros(1, target.channels, *size)
            with torch.no_grad():
                target.positions(backbone.forward_features(blank))
            return
    raise UnsupportedModel("a model that averages its last feature map", target.name, "direct=[] for AnyHead")


def default_stages(target: TargetModel) -> list[int]:
    """Return the stages whose paths AnyHead adds by default: the last three; none without paths."""
    stages = list(range(len(list(getattr(target.backbone, "feature_info", [])))))[-3:]
    with suppress(InputError):
        check_stage_paths(target, stages, target.grid.size)
        return stages
    return []
