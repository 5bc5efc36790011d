"""What a fixed head reads of patches, and the attributions to compare with labels."""

import math

import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel


def embed_as_read(target: TargetModel, grid: PatchGrid, images: Tensor) -> tuple[Tensor, Tensor]:
    """Embed images and their patches, minus what the head subtracts: the embedding, or the patches, of a blank image.

    Args:
        target: a model with a `FixedHead`.
        grid: the patches that are explained.
        images: uint8, (B, C, H, W).

    Returns:
        The embeddings of the images, (B, D), and what the head reads of the patches, float32 (B, N, D).
    """
    grid.check(images)
    normalised = target.normalise(images)
    if target.head.reading == "patch":
        embeddings, patches = target.embed_with_patches(normalised)
        return embeddings, patch_means(patches.float(), grid.side)
    with_blank = torch.cat([normalised, torch.zeros_like(normalised[:1])])  # 0 is the mean colour
    embeddings, patches = target.embed_with_patches(with_blank)
    means = patch_means(patches.float(), grid.side)
    blank = means[-1:] if target.head.reading == "blank_patch" else embeddings[-1:, None].float()
    return embeddings[:-1], means[:-1] - blank


def patch_means(patches: Tensor, side: int) -> Tensor:
    """Average the patch embeddings (B, N', D) of a fine grid over the patches of a coarser one: (B, N, D).

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


def explained(attributions: Tensor, rows: dict[str, Tensor]) -> Tensor:
    """Select the attributions to the class that `ShapleyLabels` explains in each image.

    >>> attributions = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # of two patches to two classes
    >>> explained(attributions, {"explained": torch.tensor([1])}).tolist()
    [[2.0, 4.0]]

    Args:
        attributions: attributions to all classes, (B, N, K).
        rows: the rows of `ShapleyLabels`; `explained` (B,) is missing if they explain all classes.

    Returns:
        (B, N), or (B, N, K) if all classes are explained.
    """
    if "explained" not in rows:
        return attributions
    return attributions.take_along_dim(rows["explained"][:, None, None], -1)[..., 0]
