"""Agreement between two heatmaps of the same image: E-RMSE, relative error, IoU@K and rank correlation."""

from typing import Any, Literal

import torch
from torch import Tensor

from explainers.errors import check_positive
from explainers.metrics.means import Mean, MeanOfImages, Metric, Ratios

Agreement = Literal["e_rmse", "relative_error", "iou", "rank_correlation"]


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Compute Spearman's rank correlation of each row of two (B, N). Equal scores share their mean rank.

    Returns:
        float64, (B,), in [−1, 1]; NaN for a row of equal scores.

    >>> first, second = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[10, 20, 90], [3, 2, 1]])
    >>> spearman(first, second).round(decimals=6).tolist()
    [1.0, -1.0]
    """
    first, second = (ranks - ranks.mean(-1, keepdim=True) for ranks in (_ranks(first), _ranks(second)))
    return (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))


def rank_correlation(scores: Tensor, reference: Tensor) -> Tensor:
    """Compute Spearman's rank correlation of scores (B, N) with a reference (B, N), where equal scores have none.

    Returns:
        float64, (B,), in [−1, 1]; 0 for a row of equal scores, NaN where those of the reference are equal.

    >>> rank_correlation(torch.tensor([[1, 1, 1], [1, 2, 3]]), torch.tensor([[10, 20, 90], [5, 5, 5]])).tolist()
    [0.0, nan]
    """
    equal, equal_reference = ((each == each[:, :1]).all(1) for each in (scores, reference))
    return spearman(scores, reference).masked_fill(equal & ~equal_reference, 0.0)


def _ranks(scores: Tensor) -> Tensor:
    """Rank the scores of each row, (..., N), from 0 to N − 1; equal scores share their mean rank."""
    ordered = scores.sort(-1).values
    num_lower = torch.searchsorted(ordered, scores.contiguous())
    num_not_higher = torch.searchsorted(ordered, scores.contiguous(), right=True)
    return (num_lower + num_not_higher - 1).double() / 2


def iou_at_k(first: Tensor, second: Tensor, k: int) -> Tensor:
    """Compute IoU@K: the intersection over union of the `k` most important patches of two heatmaps, for each row.

    Patches that tie for the last places share them: each counts as chosen with the probability that it is, at random.
    Two heatmaps of equal scores therefore have the IoU@K of chance, K / (2 N − K).

    Args:
        first: scores, (B, N); higher is more important.
        second: the same.
        k: number of patches to compare, in 1 ... N.

    Returns:
        (B,), in [0, 1].

    The three most important patches are {0, 1, 2} and {0, 2, 3}, which share two of four patches:

    >>> iou_at_k(torch.tensor([[3, 2, 1, 0]]), torch.tensor([[3, 0, 2, 1]]), k=3).tolist()
    [0.5]
    """
    chosen, of_other = (_find_chosen(scores, k) for scores in (first, second))
    common = (chosen * of_other).sum(-1)
    return common / (2 * k - common)


def _find_chosen(scores: Tensor, k: int) -> Tensor:
    """How likely each patch is among the `k` most important ones, in (B, N), if ties are broken at random."""
    last = scores.topk(k).values[..., -1:]
    above, ties = scores > last, scores == last
    return above.float() + ties * (k - above.sum(-1, keepdim=True)) / ties.sum(-1, keepdim=True)


class RootMeanSquaredError(Mean):
    """E-RMSE: root of the mean squared difference of two heatmaps (B, rows, columns), over all patches of all images.

    The paper gives no formula, so this follows the usual definition of an RMSE. Both heatmaps explain the same class.
    """

    higher_is_better = False
    column = "E-RMSE ↓"

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:  # type: ignore[override]
        super().update((heatmaps - reference).square())

    def compute(self) -> Tensor:
        return super().compute().sqrt()


class RelativeError(Ratios):
    """E-RMSE divided by the standard deviation of the reference heatmaps (B, rows, columns) around the mean of each.

    A constant heatmap with the sum of the reference scores 1. Unlike E-RMSE, it can be compared between references.
    """

    higher_is_better = False
    column = "Error / spread ↓"

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:  # type: ignore[override]
        scores = reference.flatten(1).double()
        variation = (scores - scores.mean(1, keepdim=True)).square().sum()
        super().update((heatmaps - reference).double().square().sum(), variation)

    def compute(self) -> Tensor:
        return (self.numerators / self.denominators).sqrt().mean().float()


class BestFactor(Ratios):
    """The factor by which heatmaps (B, rows, columns) are closest to a reference, in least squares over all images."""

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:  # type: ignore[override]
        super().update((heatmaps.double() * reference).sum(), heatmaps.double().square().sum())


class TopOverlap(MeanOfImages):
    """IoU@K of heatmaps (B, rows, columns) with reference heatmaps, averaged over images, see `iou_at_k`."""

    column = "IoU@{k} ↑"

    def __init__(self, k: int) -> None:
        super().__init__()
        check_positive(k=k)
        self.k = k

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:
        self.add(iou_at_k(heatmaps.flatten(1), reference.flatten(1), self.k))


class RankCorrelation(MeanOfImages):
    """Spearman's rank correlation of heatmaps (B, rows, columns) with reference heatmaps, averaged over images.

    A constant heatmap counts as uncorrelated, 0. Images with a constant reference are left out.
    """

    column = "ρ with the reference ↑"

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:
        self.add(rank_correlation(heatmaps.flatten(1), reference.flatten(1)))


AGREEMENTS: dict[str, Any] = {
    "e_rmse": RootMeanSquaredError,
    "relative_error": RelativeError,
    "iou": TopOverlap,
    "rank_correlation": RankCorrelation,
}
"""Name → metric. Its `column` is the title in tables, where {k} stands for the number of compared patches."""


def agreement_metrics(k: int) -> dict[str, Metric]:
    """Build a new metric for each name in `Agreement`; IoU@K compares `k` patches."""
    return {name: kind(k) if kind is TopOverlap else kind() for name, kind in AGREEMENTS.items()}
