"""Which patches of an image stay visible, and what the model then sees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from explainers.errors import InputError

Removal = Literal["zero", "black"]
"""What a hidden pixel becomes: 0 after normalisation, the mean pixel (TVE), or 0 before it (the Chefer protocol)."""


@dataclass(frozen=True)
class PatchGrid:
    """A square image cut into P × P square patches, numbered row by row."""

    image_size: int = 224
    patch_size: int = 16

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise InputError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")

    @property
    def side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.side**2


def neighbourhoods(grid: PatchGrid, hops: int) -> Tensor:
    """N(z) of every patch z: the patches at most `hops` steps away, diagonals included (TVE, Section 2).

    Returns:
        Boolean, (N, N). Row z is True on N(z); with `hops=0` it is the identity.
    """
    index = torch.arange(grid.num_patches)
    row, column = index // grid.side, index % grid.side
    distance = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
    return distance <= hops


def most_important(scores: Tensor, levels: int) -> Tensor:
    """S*, the ⌊s·N⌋ highest-scoring patches, at `levels` sparsities s from 0 to 1. Ties: the earlier patch first.

    Args:
        scores: (B, N), higher is more important.

    Returns:
        Boolean, (B, levels, N).
    """
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)  # (B, N), 0 is the most important
    return rank[:, None] < level_sizes(scores.shape[-1], levels).to(scores.device)[:, None]


def level_sizes(num_patches: int, levels: int) -> Tensor:
    """|S*| at `levels` sparsities from 0 to 1, (levels,). In integers: floats would lose a patch to rounding."""
    return torch.arange(levels) * num_patches // (levels - 1)


def mask_pixels(images: Tensor, keep: Tensor, grid: PatchGrid, fill: Tensor | float = 0.0) -> Tensor:
    """Set hidden patches to `fill`; 0 is the mean pixel of a normalised image (TVE, Section 2).

    Args:
        images: (B, C, H, W), normalised.
        keep: boolean, (B, N): one mask for each image.
        fill: a number, or one for each channel, (C, 1, 1).
    """
    if images.shape[-1] != grid.image_size or images.shape[-2] != grid.image_size:
        raise InputError(f"the grid cuts {grid.image_size} × {grid.image_size} images; got {tuple(images.shape[-2:])}")
    visible = keep.unflatten(-1, (1, grid.side, grid.side))
    visible = visible.repeat_interleave(grid.patch_size, -1).repeat_interleave(grid.patch_size, -2)  # (B, 1, H, W)
    return torch.where(visible, images, fill)


def masked_forward(
    function: Callable[[Tensor], Tensor],
    images: Tensor,
    keep: Tensor,
    grid: PatchGrid,
    fill: Tensor | float = 0.0,
    chunk_size: int = 256,
) -> Tensor:
    """`function` of every image under each of its M masks, at most `chunk_size` masked images in memory at a time.

    Args:
        function: normalised images (b, C, H, W) → (b, ...).
        images: (B, C, H, W), normalised.
        keep: boolean, (B, M, N).

    Returns:
        (B, M, ...).
    """
    owner = torch.arange(len(images), device=images.device).repeat_interleave(keep.shape[1])  # (B·M,)
    chunks = zip(owner.split(chunk_size), keep.flatten(0, 1).split(chunk_size), strict=True)
    outputs = [function(mask_pixels(images[image], mask, grid, fill)) for image, mask in chunks]
    return torch.cat(outputs).unflatten(0, keep.shape[:2])
