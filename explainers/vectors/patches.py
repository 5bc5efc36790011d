"""Embeddings of patches on the grid that is explained, and the attributions to compare."""

import math

from torch import Tensor

from explainers.errors import InputError


def patch_means(patches: Tensor, side: int) -> Tensor:
    """Average the patch embeddings (B, N', D) of a fine grid over the patches of a coarser one: (B, N, D).

    >>> import torch
    >>> patch_means(torch.arange(16.0).view(1, 16, 1), side=2).flatten().tolist()  # the first is (0 + 1 + 4 + 5) / 4
    [2.5, 4.5, 10.5, 12.5]

    Args:
        patches: patch embeddings, (B, N', D).
        side: patches per side of the coarser grid, √N.

    Raises:
        InputError: if √N' is not a multiple of `side`.
    """
    own = math.isqrt(patches.shape[1])
    if own % side:
        raise InputError(
            f"expected a grid that {own} x {own} patches of the model fit in, got {side} x {side}: set grid.patch_size"
        )
    blocks = patches.unflatten(1, (side, own // side, side, own // side))
    return blocks.mean((2, 4)).flatten(1, 2)


def explained(attributions: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """Select the attributions to the class that `ShapleyLabels` explains in each image.

    >>> import torch
    >>> attributions = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # of two patches to two classes
    >>> explained(attributions, {"explained": torch.tensor([1])}).tolist()
    [[2.0, 4.0]]

    Args:
        attributions: attributions to all classes, (B, N, K).
        seen: the rows of `ShapleyLabels`, which lack `explained` where they explain all classes.

    Returns:
        (B, N), or (B, N, K) if all classes are explained.
    """
    if "explained" not in seen:
        return attributions
    return attributions.take_along_dim(seen["explained"][:, None, None], -1)[..., 0]
