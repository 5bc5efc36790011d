"""Faithfulness on random subsets of patches: removing a subset should lower the output by the sum of its attributions.

The subsets do not depend on the explainer, so all explainers share the masked forward passes. A subset is given by
`keep`, boolean (B, M, N), which is False at the removed patches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from explainers.errors import check_range
from explainers.metrics.means import MeanOfImages
from explainers.runtime.sampling import random_patches

FRACTIONS = 0.1, 0.3, 0.5, 0.7, 0.9  # sizes of the removed subsets, as fractions of all patches
SUBSETS = 0x5E75  # default seed of the removed subsets


def subset_sizes(num_patches: int) -> list[int]:
    """Compute the number of removed patches for each of the `FRACTIONS` of N, rounded and clamped to 1 ... N − 1.

    >>> subset_sizes(196), subset_sizes(4)
    ([20, 59, 98, 137, 176], [1, 1, 2, 3, 3])
    """
    check_range(2, num_patches=num_patches)
    return [min(max(round(fraction * num_patches), 1), num_patches - 1) for fraction in FRACTIONS]


def sized_coalitions(index: Tensor, num_patches: int, sizes: Sequence[int], count: int, seed: int = SUBSETS) -> Tensor:
    """Draw `count` random subsets of every size for each image, uniformly among all subsets of that size.

    Args:
        index: index of each image in the data set, (B,).
        num_patches: N, the number of patches per image.
        sizes: numbers of removed patches, each in 1 ... N − 1.
        count: number of subsets of each size, at least 2, because one has no correlation.
        seed: seed of the subsets.

    Returns:
        The visible patches: boolean, (B, M, N) with M = len(sizes) · count, ordered by size as in `sizes`.

    >>> sized_coalitions(torch.tensor([0, 7]), num_patches=9, sizes=[2, 6], count=3).sum(-1).tolist()
    [[7, 7, 7, 3, 3, 3], [7, 7, 7, 3, 3, 3]]
    """
    check_range(2, count=count)
    for size in sizes:
        check_range(1, num_patches - 1, size=size)
    removed = torch.tensor(sizes, device=index.device).repeat_interleave(count)  # (M,)
    subset = index[:, None] * len(removed) + torch.arange(len(removed), device=index.device)  # (B, M)
    permutations = random_patches(subset.flatten(), num_patches, num_patches, seed)  # (B·M, N)
    return permutations.unflatten(0, subset.shape) >= removed[:, None]


def sensitivity_n(scores: Tensor, keep: Tensor, drops: Tensor) -> Tensor:
    """Compute sensitivity-n: the correlation of summed attributions with drops of the output (Ancona et al., 2018).

    It is Pearson's correlation over all subsets of n patches, averaged over n. An offset or a positive factor of the
    heatmap does not change it. Random heatmaps have a mean of 0.

    Args:
        scores: attributions, (B, N).
        keep: the visible patches, boolean (B, M, N), with several subsets of each size, see `sized_coalitions`.
        drops: output for the whole image minus output without the subset, (B, M).

    Returns:
        float64, (B,), in [−1, 1]. Equal sums, as those of equal scores, count as uncorrelated, 0. The mean skips sizes
        whose drops are all equal, and is NaN if no size remains.

    >>> keep = ~torch.eye(3, dtype=torch.bool)[None]  # only the first patch matters
    >>> sensitivity_n(torch.tensor([[0.9, 0.5, 0.5]]), keep, torch.tensor([[1.0, 0.0, 0.0]])).round(decimals=6).tolist()
    [1.0]
    """
    sizes = (~keep).sum(-1)
    of_size = (sizes[..., None] == sizes.unique()).double()  # (B, M, sizes)
    sums, drops = (_deviations(values, of_size) for values in (sum_removed(scores, keep), drops.double()))
    return (sums.nan_to_num() * drops).sum(1).nanmean(1)


def sum_removed(scores: Tensor, keep: Tensor) -> Tensor:
    """Sum the attributions (B, N) of the patches that `keep` (B, M, N) removes: float64, (B, M)."""
    return ((~keep).double() @ scores.double()[..., None]).squeeze(-1)


def _deviations(values: Tensor, of_size: Tensor) -> Tensor:
    """Centre values (B, M) within each subset size and scale them to length 1 over M: (B, M, sizes), 0 at other sizes.

    A size whose values are equal up to rounding gets NaN.
    """
    values = values[..., None] * of_size
    centred = (values - values.sum(1, keepdim=True) / of_size.sum(1, keepdim=True).clamp(min=1)) * of_size
    length = centred.norm(dim=1, keepdim=True)
    return torch.where(length > 1e-9 * values.norm(dim=1, keepdim=True), centred / length, torch.nan)


def infidelity(scores: Tensor, keep: Tensor, drops: Tensor) -> Tensor:
    """Compute infidelity with the best factor, relative to the squared drops (INFD of Yeh et al., 2019).

    Σ_S (β a_S − d_S)² / Σ_S d_S², where a_S is the sum of the attributions of the removed subset S and d_S the drop.
    β = Σ a_S d_S / Σ a_S² is the best factor of each image, as in the paper's code. A perfect explanation scores 0, and
    a heatmap of zeros scores 1. One of equal scores, the baseline, is below 1, because larger subsets have larger
    drops. An offset of the heatmap changes the result; its sign does not, because β may be negative.

    For arguments see `sensitivity_n`.

    Returns:
        float64, (B,), in [0, 1]; NaN if all drops are 0.

    >>> keep = torch.tensor([[[False, True], [True, False], [False, False]]])
    >>> drops = torch.tensor([[1.0, 3.0, 4.0]])
    >>> infidelity(torch.tensor([[10.0, 30.0]]), keep, drops).round(decimals=6).tolist()
    [0.0]
    >>> infidelity(torch.ones(1, 2), keep, drops).tolist()
    [0.0769...]
    """
    sums, drops = sum_removed(scores, keep), drops.double()
    length = sums.square().sum(1)
    explained = torch.where(length > 0, (sums * drops).sum(1).square() / length, 0.0)
    return (1 - explained / drops.square().sum(1)).clamp(min=0)


class SensitivityN(MeanOfImages):
    """Sensitivity-n of heatmaps (B, rows, columns), averaged over images that define it, see `sensitivity_n`."""

    column = "Sensitivity-n ↑"

    def update(self, heatmaps: Tensor, keep: Tensor, drops: Tensor) -> None:
        self.add(sensitivity_n(heatmaps.flatten(1), keep, drops))


class Infidelity(MeanOfImages):
    """Infidelity of heatmaps (B, rows, columns), averaged over images, see `infidelity`."""

    column = "Infidelity ↓"
    higher_is_better = False

    def update(self, heatmaps: Tensor, keep: Tensor, drops: Tensor) -> None:
        self.add(infidelity(heatmaps.flatten(1), keep, drops))
