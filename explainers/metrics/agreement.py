"""How much two explanations of the same image agree."""

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from explainers.errors import InputError

Agreement = Literal["e_rmse", "iou", "rank_correlation"]


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's rank correlation of each row, (B, N) and (B, N) → (B,). Ties share their mean rank."""
    return _pearson(_ranks(first), _ranks(second))


def _ranks(scores: Tensor) -> Tensor:
    ordered = scores.sort(-1).values
    below = torch.searchsorted(ordered, scores.contiguous())
    upto = torch.searchsorted(ordered, scores.contiguous(), right=True)
    return (below + upto - 1).double() / 2


def _pearson(first: Tensor, second: Tensor) -> Tensor:
    first, second = first - first.mean(-1, keepdim=True), second - second.mean(-1, keepdim=True)
    return (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))


def iou_at_k(first: Tensor, second: Tensor, k: int) -> Tensor:
    """|top K of one ∩ top K of the other| / |their union| of each row, (B, N) and (B, N) → (B,).

    Of equal scores, the earlier patch is the more important.

    Raises:
        InputError: for a K that is not among 1 ... N.
    """
    if not 1 <= k <= first.shape[-1]:
        raise InputError(f"expected k to be one of 1 to {first.shape[-1]}, the number of patches, got {k}")
    tops = [torch.zeros_like(scores, dtype=torch.bool) for scores in (first, second)]
    for top, scores in zip(tops, (first, second), strict=True):
        top.scatter_(-1, scores.argsort(dim=-1, descending=True, stable=True)[..., :k], True)
    return (tops[0] & tops[1]).sum(-1) / (tops[0] | tops[1]).sum(-1)


class RootMeanSquaredError(MeanMetric):
    """E-RMSE: the root of the mean squared difference of heatmaps (B, P, P), over all patches of all images.

    The paper gives no formula; this is the usual meaning of its name. Both heatmaps explain the same class.
    """

    higher_is_better = False  # type: ignore[assignment]
    column = "E-RMSE ↓"

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:  # type: ignore[override]
        super().update((heatmaps - reference).square())

    def compute(self) -> Tensor:
        return super().compute().sqrt()


class TopOverlap(MeanMetric):
    """IoU@K of heatmaps (B, P, P) with reference heatmaps, see `iou_at_k`, averaged over images."""

    higher_is_better = True  # type: ignore[assignment]

    def __init__(self, k: int) -> None:
        super().__init__()
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
    """A new metric of each `Agreement`. k: of IoU@K."""
    return {
        "e_rmse": RootMeanSquaredError(),
        "iou": TopOverlap(k),
        "rank_correlation": RankCorrelation(nan_strategy="ignore"),
    }
