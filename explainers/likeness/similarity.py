"""The similarity of images, as a functional of the embedding of one of them, and the nearest images of many."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_positive, checks_choices
from explainers.models.functionals import Length, cosine_functionals


def relative(embeddings: Tensor, centre: Tensor | None = None) -> Tensor:
    """Embeddings (B, D) relative to `centre` (D,), in float32.

    What all images have in common makes all similarities large. The mean embedding of many images, or the embedding of
    a blank image, takes it away.
    """
    return embeddings.float() if centre is None else embeddings.float() - centre.float().to(embeddings.device)


@checks_choices
def similar_to(
    explainer: Any, images: Tensor, others: Tensor, centre: Tensor | None = None, length: Length = "constant"
) -> Tensor:
    """Explain what makes images similar to others: the cosine of e − m and e' − m, for embeddings e and e'.

    Args:
        explainer: an explainer of functionals, such as AnyHead, or a method that reads the inside of a transformer.
        images: uint8, (B, C, H, W).
        others: e', embeddings of V other images for all, (V, D), or of V for each image, (B, V, D).
        centre: m, (D,), see `relative`; `None` for 0.
        length: see `cosine_functionals`.

    Returns:
        Heatmaps, (B, V, P, P).

    Raises:
        InputError: for embeddings of another width, or an explainer of classes alone, such as RISE.
    """
    if not hasattr(explainer, "explain"):
        raise InputError(
            f"expected an explainer of any functional of the embedding, got {type(explainer).__name__}, which explains"
            " classes alone: take AnyHead, or a method such as DecompX-SkipPLUS"
        )
    width = explainer.target.embed_dim
    if others.dim() not in (2, 3) or others.shape[-1] != width:
        raise InputError(
            f"expected embeddings of other images, of shape [V, {width}] or [{len(images)}, V, {width}], got"
            f" {list(others.shape)}: embed them with the same model"
        )
    directions = F.normalize(relative(others, centre), dim=-1)

    def functionals(embeddings: Tensor) -> Tensor:
        own = relative(embeddings.detach(), centre)
        return cosine_functionals(own, directions.to(own.device), length=length)

    return explainer.explain(images, functionals)


def nearest(embeddings: Tensor, queries: Tensor, k: int = 5, centre: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the most similar embeddings by the cosine.

    Args:
        embeddings: of the images to choose from, (M, D).
        queries: (B, D).
        k: number of images for each query.
        centre: see `relative`.

    Returns:
        Similarities and indices, (B, k), the most similar first; k is at most M.

    >>> import torch
    >>> similarities, indices = nearest(torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([[0.6, 0.8]]), k=1)
    >>> round(similarities.item(), 4), indices.tolist()
    (0.8, [[1]])
    """
    check_positive(k=k)
    known, asked = (F.normalize(relative(each, centre), dim=-1) for each in (embeddings, queries))
    found = (asked @ known.mT).topk(min(k, len(known)), dim=-1)
    return found.values, found.indices
