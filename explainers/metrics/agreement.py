"""Agreement between two heatmaps of the same image: E-RMSE, IoU@K and Spearman's rank correlation."""

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from explainers.errors import InputError, check_positive

Agreement = Literal["e_rmse", "iou", "rank_correlation"]


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Compute Spearman's rank correlation of each row. Equal scores share their mean rank.

    Args:
        first: (B, N).
        second: (B, N).

    Returns:
        float64, (B,), in [−1, 1]; NaN for a row of equal scores.

    >>> first, second = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[10, 20, 90], [3, 2, 1]])
    >>> spearman(first, second).round(decimals=6).tolist()
    [1.0, -1.0]
    """
    return _pearson(_ranks(first), _ranks(second))


def _ranks(scores: Tensor) -> Tensor:
    """Rank the scores of each row, (..., N), from 0 to N − 1; equal scores share their mean rank."""
    ordered = scores.sort(-1).values
    num_lower = torch.searchsorted(ordered, scores.contiguous())
    num_not_higher = torch.searchsorted(ordered, scores.contiguous(), right=True)
    return (num_lower + num_not_higher - 1).double() / 2


def _pearson(first: Tensor, second: Tensor) -> Tensor:
    """Compute Pearson's correlation of each row: (..., N) and (..., N) → (...)."""
    first, second = first - first.mean(-1, keepdim=True), second - second.mean(-1, keepdim=True)
    return (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))


def iou_at_k(first: Tensor, second: Tensor, k: int) -> Tensor:
    """Compute the intersection over union of the K most important patches of both heatmaps, for each row.

    Of two equal scores, the one of the earlier patch counts as higher.

    Args:
        first: (B, N), higher is more important.
        second: (B, N), higher is more important.
        k: K, in 1 ... N.

    Returns:
        (B,), in [0, 1].

    Raises:
        InputError: if `k` is not in 1 ... N.

    The three most important patches are {0, 1, 2} and {0, 2, 3}; two of four are common:

    >>> iou_at_k(torch.tensor([[3, 2, 1, 0]]), torch.tensor([[3, 0, 2, 1]]), k=3).tolist()
    [0.5]
    """
    if not 1 <= k <= first.shape[-1]:
        raise InputError(f"expected k to be one of 1 to {first.shape[-1]}, the number of patches, got {k}")
    tops = [torch.zeros_like(scores, dtype=torch.bool) for scores in (first, second)]
    for top, scores in zip(tops, (first, second), strict=True):
        top.scatter_(-1, scores.argsort(dim=-1, descending=True, stable=True)[..., :k], True)
    return (tops[0] & tops[1]).sum(-1) / (tops[0] | tops[1]).sum(-1)


class RootMeanSquaredError(MeanMetric):
    """E-RMSE: root of the mean squared difference of two heatmaps (B, P, P), over all patches of all images.

    The paper gives no formula; this is the usual meaning of its name. Both heatmaps explain the same class.

    >>> metric = RootMeanSquaredError()
    >>> metric.update(torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]), torch.zeros(1, 2, 2))
    >>> metric.compute().item()
    1.0
    """

    higher_is_better = False  # type: ignore[assignment]
    column = "E-RMSE ↓"

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:  # type: ignore[override]
        super().update((heatmaps - reference).square())

    def compute(self) -> Tensor:
        return super().compute().sqrt()


class TopOverlap(MeanMetric):
    """IoU@K of heatmaps (B, P, P) with reference heatmaps, averaged over images.

    Args:
        k: K, see `iou_at_k`.
    """

    higher_is_better = True  # type: ignore[assignment]

    def __init__(self, k: int) -> None:
        super().__init__()
        check_positive(k=k)
        self.k, self.column = k, f"IoU@{k} ↑"

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:  # type: ignore[override]
        super().update(iou_at_k(heatmaps.flatten(1), reference.flatten(1), self.k))


class RankCorrelation(MeanMetric):
    """Spearman's rank correlation of heatmaps (B, P, P) with reference heatmaps, averaged over images."""

    higher_is_better = True  # type: ignore[assignment]
    column = "ρ with the reference ↑"

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:  # type: ignore[override]
        super().update(spearman(heatmaps.flatten(1), reference.flatten(1)))


def agreement_metrics(k: int) -> dict[str, Metric]:
    """Build a new metric for each name in `Agreement`.

    The rank correlation leaves out images with a constant heatmap, for which it is undefined.

    Args:
        k: K of IoU@K.
    """
    return {
        "e_rmse": RootMeanSquaredError(),
        "iou": TopOverlap(k),
        "rank_correlation": RankCorrelation(nan_strategy="ignore"),
    }
