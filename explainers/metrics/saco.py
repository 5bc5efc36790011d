"""SaCo: whether groups of patches with more salience matter more to the prediction (Wu et al., CVPR 2024)."""

import torch
from torch import Tensor

from explainers.errors import check_range
from explainers.metrics.means import MeanOfImages
from explainers.metrics.perturbation import importance_order


def salience_groups(scores: Tensor, index: Tensor, groups: int = 10) -> Tensor:
    """Cut the patches of each image, in order of salience, into groups G_1 ... G_K of ⌊N / K⌋ patches.

    G_1 has the most salient patches, G_K the least. The N mod K patches that remain lie evenly between the groups and
    are in none: a group with one patch more has a larger drop and a larger salience whatever the heatmap is, so that
    random heatmaps would have a coefficient above 0. Patches with equal scores are in random order, see
    `importance_order`.

    Args:
        scores: salience, (B, N).
        index: index of each image in the data set, (B,).
        groups: K, in 2 ... N.

    Returns:
        The visible patches when one group is hidden: boolean, (B, K, N).

    Raises:
        InputError: if `groups` is not in 2 ... N.

    >>> salience_groups(torch.tensor([[5, 4, 3, 2, 1]]), torch.tensor([0]), groups=2).int().tolist()
    [[[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]]
    """
    num_patches = scores.shape[-1]
    check_range(2, num_patches, groups=groups)
    size = num_patches // groups
    first = torch.arange(groups, device=scores.device) * (num_patches - size) // (groups - 1)  # rank of its first patch
    offset = importance_order(scores, index).argsort(-1)[:, None] - first[:, None]  # (B, K, N)
    return (offset < 0) | (offset >= size)


def group_saliences(scores: Tensor, keep: Tensor) -> Tensor:
    """Compute s, the summed salience of each group.

    Saliences are relative to the lowest of the image. This changes no difference between groups of equal size, and
    patches of equal salience have exactly 0.

    Args:
        scores: salience, (B, N).
        keep: the visible patches when one group is hidden, boolean (B, K, N), see `salience_groups`.

    Returns:
        float64, (B, K).

    >>> keep = torch.tensor([[[False, False, True, True, True], [True, True, True, False, False]]])
    >>> group_saliences(torch.tensor([[5, 4, 3, 2, 1]]), keep).tolist()
    [[7.0, 1.0]]
    """
    relative = scores.double() - scores.amin(-1, keepdim=True)
    return ((~keep).double() @ relative[..., None]).squeeze(-1)


def saco(drops: Tensor, saliences: Tensor) -> Tensor:
    """Compute the Salience-guided Faithfulness Coefficient F (Algorithm 1).

    F = Σ w_ij / Σ |w_ij| over all pairs of groups with s_i > s_j, where w_ij is s_i − s_j if d_i ≥ d_j, and s_j − s_i
    otherwise. F is 1 if groups with more salience always have the larger drop, and −1 if they never have. Groups of
    equal salience have no order: if all are equal, F is 0, which is also the mean over random orders.

    Equal drops agree with any salience, as in the paper. So F is 1 where no group changes the prediction at all.

    Args:
        drops: d_i = p_y(x) − p_y(x without G_i), (B, K).
        saliences: s_i, summed salience of G_i, (B, K), see `group_saliences`.

    Returns:
        float64, (B,), in [−1, 1].

    The pairs (1, 2) and (1, 3) agree, with weights 1 and 2; the pair (2, 3) does not, with weight 1:

    >>> saco(torch.tensor([[0.3, 0.1, 0.2]]), torch.tensor([[3.0, 2.0, 1.0]])).tolist()
    [0.5]
    """
    weights = (saliences[:, :, None] - saliences[:, None]).double().clamp(min=0)  # (B, K, K)
    agrees = drops[:, :, None] >= drops[:, None]
    total = weights.sum((1, 2))
    signed = torch.where(agrees, weights, -weights).sum((1, 2))
    return torch.where(total > 0, signed / total, 0.0)


class SaCo(MeanOfImages):
    """The Salience-guided Faithfulness Coefficient, averaged over images, see `saco`.

    >>> metric = SaCo()
    >>> metric.update(torch.tensor([[0.3, 0.1, 0.2], [0.3, 0.2, 0.1]]), torch.tensor([[3.0, 2.0, 1.0]] * 2))
    >>> metric.compute().item()
    0.75
    """

    column = "SaCo ↑"

    def update(self, drops: Tensor, saliences: Tensor) -> None:
        """Add images, with the arguments of `saco`."""
        self.add(saco(drops, saliences))
