"""An open vocabulary for any classifier: text heads that are fitted to the rows of its own head."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_positive, check_range
from explainers.models import TargetModel
from explainers.models.functionals import class_rows
from explainers.runtime.modes import to_float64
from explainers.text.encoders import AS_IT_IS, Encoder, text_embeddings
from explainers.text.heads import TextHead

RIDGE = 1.0
"""λ: from 0.1 to 10, the accuracy on unseen classes hardly depends on it."""

FOLDS = 10


def fit_text_head(
    target: TargetModel,
    texts: Sequence[str],
    encode: Encoder,
    *,
    labelled: tuple[Tensor, Tensor] | None = None,
    ridge: float = RIDGE,
    templates: Sequence[str] = AS_IT_IS,
) -> TextHead:
    """Give a classifier an open vocabulary: a linear map from embeddings of texts to functionals of its embedding.

    Ridge regression maps the text of each class to its row of the head. A text that is no class then has a functional,
    too. How well this generalises is printed: the accuracy among classes that the fit did not see, or without labelled
    images the cosine of their rows. Texts without a relative among the classes have meaningless functionals.

    Args:
        target: a classifier with a linear head of K classes.
        texts: K texts, one for each class in the order of the logits, such as `a photo of a tench`.
        encode: embeds texts, see `Encoder`.
        labelled: embeddings (B, D) of labelled images, and their labels (B,), for the accuracy.
        ridge: λ of the regression.
        templates: see `TextHead`.

    Raises:
        InputError: unless there is one text for each class, or for a head that is not linear.
    """
    rows = class_rows_of_texts(target, texts)
    embedded = text_embeddings(encode, texts, templates).to(rows.device)
    centre = embedded.mean(0)
    projection = ridge_map(embedded - centre, rows, ridge)
    folds = min(FOLDS, len(rows))
    unseen = unseen_rows(embedded, rows, ridge, folds)
    if labelled is None:
        cosine = F.cosine_similarity(rows, unseen, dim=-1).mean().item()
        print(f"text head: mean cosine {cosine:.2f} of the rows of unseen classes with those from their text")
    else:
        ranks, sizes = held_out_ranks(*labelled, unseen, folds)
        top_1, top_5, chance = (100 * share.float().mean().item() for share in (ranks < 1, ranks < 5, 1 / sizes))
        print(
            f"text head: {top_1:.3g} % top-1 and {top_5:.3g} % top-5 among about {sizes.mean().item():.0f} unseen"
            f" classes, on {len(ranks)} images (chance {chance:.2g} %)"
        )
    return TextHead(encode, projection, centre, normalise=False, templates=templates)


def class_rows_of_texts(target: TargetModel, texts: Sequence[str]) -> Tensor:
    """The rows of a linear head relative to their mean, (K, D), one for each text."""
    rows = class_rows(target.head, target.embed_dim, target.mean).float()
    if len(texts) != len(rows):
        raise InputError(f"expected {len(rows)} texts, one for each class of {target.name}, got {len(texts)}")
    return rows - rows.mean(0)


def ridge_map(texts: Tensor, rows: Tensor, ridge: float = RIDGE) -> Tensor:
    """Fit rows W (K, D) ≈ T M to texts T (K, D') by ridge regression: M = (TᵀT + λ I)⁻¹ TᵀW, (D', D).

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

    Args:
        texts: embeddings of the K classes' texts, (K, D').
        rows: W, (K, D), relative to their mean.
        ridge: λ, see `ridge_map`.
        folds: number of folds, at least 2; class k is in fold k modulo `folds`.
    """
    check_range(2, len(texts), folds=folds)
    predicted = torch.empty_like(rows, dtype=torch.float)
    fold = torch.arange(len(texts), device=texts.device) % folds
    for held in range(folds):
        fitted = fold != held
        centre = texts[fitted].mean(0)
        fit = ridge_map(texts[fitted] - centre, rows[fitted], ridge)
        predicted[fold == held] = (texts[fold == held] - centre) @ fit
    return predicted


def held_out_ranks(embeddings: Tensor, labels: Tensor, rows: Tensor, folds: int = FOLDS) -> tuple[Tensor, Tensor]:
    """Classify embeddings (B, D) with labels (B,) among the classes of the fold of their own class.

    Args:
        embeddings: of labelled images, (B, D).
        labels: (B,).
        rows: `unseen_rows` of all classes, (K, D).
        folds: the number with which they were made.

    Returns:
        The number of classes with a higher score than the image's own, and the number of classes in its fold, (B,).
    """
    fold = torch.arange(len(rows), device=rows.device) % folds
    scores = embeddings.float() @ rows.mT
    scores = scores.masked_fill(fold != fold[labels][:, None], -torch.inf)
    ranks = (scores > scores.gather(1, labels[:, None])).sum(1)
    return ranks, fold.bincount()[fold[labels]].float()
