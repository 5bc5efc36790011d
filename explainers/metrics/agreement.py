"""How much two explanations of the same image agree."""

import torch
from torch import Tensor
from torchmetrics import MeanMetric


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


class RankCorrelation(MeanMetric):
    """Spearman's rank correlation of heatmaps (B, P, P) with reference heatmaps, averaged over images."""

    higher_is_better = True  # type: ignore[assignment]

    def update(self, heatmaps: Tensor, reference: Tensor) -> None:  # type: ignore[override]
        super().update(spearman(heatmaps.flatten(1), reference.flatten(1)))
