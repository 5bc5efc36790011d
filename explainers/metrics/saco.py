"""SaCo: whether removing groups of patches with more salience changes the prediction more (Wu et al., CVPR 2024)."""

import torch
from torch import Tensor

from explainers.errors import check_range
from explainers.metrics.perturbation import importance_order


def salience_groups(scores: Tensor, index: Tensor, groups: int = 10) -> Tensor:
    """Cut the patches of each image, in order of salience, into groups G_1 ... G_M of ⌊N / M⌋ patches.

    G_1 has the most salient patches, G_M the least. The remaining N mod M patches lie evenly between the groups and
    belong to none: with groups of uneven size, random heatmaps would score above 0. Patches with equal scores are in
    random order, see `importance_order`.

    Args:
        scores: salience, (B, N).
        index: index of each image in the data set, (B,).
        groups: M, in 2 ... N.

    Returns:
        The visible patches, with one group hidden by each mask: boolean, (B, M, N).

    >>> salience_groups(torch.tensor([[5, 4, 3, 2, 1]]), torch.tensor([0]), groups=2).int().tolist()
    [[[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]]
    """
    num_patches = scores.shape[-1]
    check_range(2, num_patches, groups=groups)
    size = num_patches // groups
    first = torch.arange(groups, device=scores.device) * (num_patches - size) // (groups - 1)  # ranks of first patches
    offset = importance_order(scores, index).argsort(-1)[:, None] - first[:, None]  # (B, M, N)
    return (offset < 0) | (offset >= size)


def group_saliences(scores: Tensor, keep: Tensor) -> Tensor:
    """Compute s, the summed salience of each group, float64 (B, M), from salience (B, N) and `salience_groups`.

    The lowest salience of the image is subtracted first, so that a heatmap of equal scores gives exactly 0.

    >>> keep = torch.tensor([[[False, False, True, True, True], [True, True, True, False, False]]])
    >>> group_saliences(torch.tensor([[5, 4, 3, 2, 1]]), keep).tolist()
    [[7.0, 1.0]]
    """
    relative = scores.double() - scores.amin(-1, keepdim=True)
    return ((~keep).double() @ relative[..., None]).squeeze(-1)


def saco(drops: Tensor, saliences: Tensor) -> Tensor:
    """Compute the Salience-guided Faithfulness Coefficient F (Algorithm 1).

    F = Σ w_ij / Σ |w_ij| over all pairs of groups with s_i > s_j, where w_ij is s_i − s_j if d_i ≥ d_j, and s_j − s_i
    otherwise. If all saliences are equal, F is 0, which is also its mean over random orders. Equal drops agree with any
    salience, as in the paper: F is 1 if no group changes the prediction.

    Args:
        drops: d_i = p_y(x) − p_y(x without G_i), (B, M).
        saliences: s_i, summed salience of G_i, (B, M), see `group_saliences`.

    Returns:
        float64, (B,), in [−1, 1].

    The pairs (1, 2) and (1, 3) agree, with weights 1 and 2. The pair (2, 3) disagrees, with weight 1:

    >>> saco(torch.tensor([[0.3, 0.1, 0.2]]), torch.tensor([[3.0, 2.0, 1.0]])).tolist()
    [0.5]
    """
    weights = (saliences[:, :, None] - saliences[:, None]).double().clamp(min=0)  # (B, M, M)
    agrees = drops[:, :, None] >= drops[:, None]
    total = weights.sum((1, 2))
    signed = torch.where(agrees, weights, -weights).sum((1, 2))
    return torch.where(total > 0, signed / total, 0.0)
