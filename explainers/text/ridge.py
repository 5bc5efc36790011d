"""Ridge regression from embeddings of texts to rows of a head, and its accuracy for classes that it has not seen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from explainers.errors import check_positive, check_range
from explainers.runtime.modes import to_float64

RIDGE = 1.0
"""λ: from 0.1 to 10, the accuracy on unseen classes hardly depends on it."""

FOLDS = 10


def ridge_map(texts: Tensor, rows: Tensor, ridge: float = RIDGE) -> Tensor:
    """Fit rows W ≈ T M by ridge regression: M = (TᵀT + λ I)⁻¹ TᵀW, (D', D).

    Args:
        texts: T, (K, D').
        rows: W, (K, D).
        ridge: λ.

    >>> ridge_map(torch.tensor([[1.0], [-1.0]]), torch.tensor([[3.0], [-3.0]]), ridge=1.0).tolist()
    [[2.0]]
    """
    check_positive(ridge=ridge)
    device = rows.device
    texts, rows = to_float64(texts), to_float64(rows)
    penalty = ridge * torch.eye(texts.shape[1], dtype=torch.double, device=texts.device)
    return torch.linalg.solve(texts.mT @ texts + penalty, texts.mT @ rows).float().to(device)


def unseen_rows(texts: Tensor, rows: Tensor, ridge: float = RIDGE, folds: int = FOLDS) -> Tensor:
    """Predict the row of every class from its text, by fits to the classes of the other folds: (K, D).

    Class k is in fold k modulo `folds`.

    Args:
        texts: embeddings of the K classes' texts, (K, D').
        rows: W, (K, D), relative to their mean.
        ridge: λ, see `ridge_map`.
        folds: number of folds, at least 2.
    """
    check_range(2, len(texts), folds=folds)
    predicted = torch.empty_like(rows, dtype=torch.float)
    fold = torch.arange(len(texts), device=texts.device) % folds
    for held in range(folds):
        fitted = fold != held
        centre = texts[fitted].mean(0)
        predicted[fold == held] = (texts[fold == held] - centre) @ ridge_map(
            texts[fitted] - centre, rows[fitted], ridge
        )
    return predicted


@dataclass(frozen=True)
class HeldOutAccuracy:
    """How well texts alone tell apart classes that the fit has not seen.

    Args:
        top_1: share of images whose class has the highest score among the unseen classes of its fold.
        top_5: share of images whose class is among the five highest.
        chance_1: top_1 of guessing.
        images: number of images.
        classes: mean number of classes in a fold.
    """

    top_1: float
    top_5: float
    chance_1: float
    images: int
    classes: float

    def __str__(self) -> str:
        return (
            f"text head: {100 * self.top_1:.3g} % top-1 and {100 * self.top_5:.3g} % top-5 among about"
            f" {self.classes:.0f} unseen classes, on {self.images} images (chance {100 * self.chance_1:.2g} %)"
        )


def held_out_accuracy(embeddings: Tensor, labels: Tensor, rows: Tensor, folds: int = FOLDS) -> HeldOutAccuracy:
    """Classify images among the classes of the fold of their own class, by `unseen_rows`.

    Args:
        embeddings: of labelled images, (B, D).
        labels: (B,).
        rows: `unseen_rows` of all classes, (K, D).
        folds: the number with which they were made.
    """
    fold = torch.arange(len(rows), device=rows.device) % folds
    scores = embeddings.float() @ rows.mT
    scores = scores.masked_fill(fold != fold[labels][:, None], -torch.inf)
    ranks = (scores > scores.gather(1, labels[:, None])).sum(1)
    sizes = fold.bincount()[fold[labels]].float()
    return HeldOutAccuracy(
        top_1=(ranks < 1).float().mean().item(),
        top_5=(ranks < 5).float().mean().item(),
        chance_1=(1 / sizes).mean().item(),
        images=len(labels),
        classes=sizes.mean().item(),
    )
