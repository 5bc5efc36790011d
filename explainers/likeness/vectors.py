"""One vector c_z of every patch, from any explainer that is linear in what it explains."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from explainers import VectorExplainer
from explainers.errors import InputError

CHUNK = 64
"""Number of functionals that a method explains at once."""


def vectors_of(explainer: Any, images: Tensor, chunk_size: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Compute vectors c_z, such that v · c_z is the heatmap of v · G(x).

    Explainers with vectors, such as AnyHead, need one pass. Other linear methods, such as DecompX-PLUS, explain every
    channel of the embedding: D backward passes.

    Args:
        explainer: a `VectorExplainer`, or a method whose attribute `linear` is True.
        images: uint8, (B, C, H, W).
        chunk_size: number of functionals that a method explains at once; fewer take less memory and more time.

    Returns:
        c_z (B, N, D), and the embeddings (B, D), float32.

    Raises:
        InputError: for an explainer that is not linear, such as GAE.
    """
    if isinstance(explainer, VectorExplainer):
        vectors, embeddings = explainer.decompose(images)
        return vectors.detach().float(), embeddings.detach().float()
    if not getattr(explainer, "linear", False):
        raise InputError(
            f"expected an explainer that is linear in what it explains, got {type(explainer).__name__}: take AnyHead,"
            " or a method such as DecompX-PLUS or DirectPaths"
        )
    width = explainer.target.embed_dim
    seen: list[Tensor] = []

    def channels(start: int) -> Callable[[Tensor], Tensor]:
        def functionals(embeddings: Tensor) -> Tensor:
            seen.append(embeddings.detach().float())
            some = torch.eye(width, device=embeddings.device)[start : start + chunk_size]
            return some.expand(len(embeddings), -1, -1)

        return functionals

    maps = [explainer.explain(images, channels(start)) for start in range(0, width, chunk_size)]
    return torch.cat(maps, 1).flatten(2).mT.detach().float(), seen[0]
