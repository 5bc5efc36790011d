"""Patches of an image, sets of visible patches, and images with the other patches removed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_distinct, check_positive, check_range
from explainers.runtime.progress import advance

ImageSize = int | tuple[int, int]
"""Height and width of an image in pixels, or one number for both."""

Removal = Literal["zero", "black", "drop", "noisy_linear"]
"""How to hide patches. `zero` sets pixels to 0 after normalisation, the mean pixel (TVE). `black` sets them to 0 before
it (Chefer). `drop` removes tokens, and the others keep their positions (SkipPLUS); for ViTs only. `noisy_linear` fills
them in from the visible pixels around (ROAD), which takes as long as a small model does."""


PATCH = 16
"""Usual side of a patch, in pixels."""
SIDE = 7
"""Smallest number of patches per side by default."""


@dataclass(frozen=True)
class PatchGrid:
    """An image cut into rows and columns of square patches, numbered row by row.

    Args:
        image_size: height and width of the image in pixels, or one number for both. Equal ones are kept as one number,
            so that a square has one identity.
        patch_size: side of a patch, in pixels.
        differs: whether the patches may differ from those of the model, see `TargetModel.check_grid`.
    """

    image_size: ImageSize = 224
    patch_size: int = 16
    differs: bool = field(default=False, compare=False)  # only switches off a check, so no part of the identity

    def __post_init__(self) -> None:
        check_positive(patch_size=self.patch_size)
        size = read_size(self.image_size)
        object.__setattr__(self, "image_size", size[0] if size[0] == size[1] else size)
        if any(side % self.patch_size for side in size):
            raise InputError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")

    @property
    def size(self) -> tuple[int, int]:
        """H and W, height and width of the image, in pixels."""
        return read_size(self.image_size)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.size
        return height // self.patch_size, width // self.patch_size

    @property
    def num_patches(self) -> int:
        """N, the number of patches."""
        return math.prod(self.shape)

    def check(self, images: Tensor) -> None:
        """Raise an InputError unless there is at least one image, and images (..., H, W) have the size of this grid."""
        if images.shape[-2:] != self.size:
            raise InputError(f"the grid cuts {self.size[0]} × {self.size[1]} images; got {tuple(images.shape[-2:])}")
        if not images.numel():
            raise InputError(f"expected at least one image, got an empty batch of shape {list(images.shape)}")


def read_size(image_size: ImageSize) -> tuple[int, int]:
    """Return height and width of an `image_size`, one number for both or two; an InputError for anything else.

    >>> read_size(448), read_size([224, 448])
    ((448, 448), (224, 448))
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    numbers = tuple(size) if isinstance(size, Sequence) and not isinstance(size, str) else ()
    if len(numbers) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in numbers):
        raise InputError(
            f"expected image_size in pixels, such as 224, or (224, 448) for height and width, got {image_size!r}"
        )
    return numbers


def default_patch_size(size: tuple[int, int]) -> int:
    """Return the largest side of a patch up to 16 pixels that cuts H × W pixels into 7 rows and columns or more.

    Raises:
        InputError: if only patches of one pixel divide the image.

    >>> [default_patch_size((size, 96)) for size in (224, 96, 32, 28)]
    [8, 12, 4, 4]
    """
    sides = [side for side in range(2, PATCH + 1) if math.gcd(*size) % side == 0 and min(size) // side >= SIDE]
    if not sides and min(size) > SIDE * 2:
        raise InputError(
            f"expected an image_size that patches of 2 to {PATCH} pixels divide, got {size[0]} × {size[1]}: give"
            f" others that the model takes, such as {tuple(side - side % PATCH or PATCH for side in size)}"
        )
    return max(sides, default=1)


def find_patch_size(size: tuple[int, int], usual: int = PATCH) -> int:
    """Find the side of patches for images of H × W pixels, of half to twice the usual side.

    It is the one that leaves the fewest pixels at the margins; of several, the nearest to the usual one.

    >>> [find_patch_size((side, side)) for side in (224, 380, 300, 299, 28, 331)]
    [16, 19, 15, 13, 14, 15]
    """
    sides = range(max(1, usual // 2), 2 * usual + 1)
    return min(sides, key=lambda side: (sum(each % side for each in size), abs(math.log(side / usual))))


def map_shape(positions: int, shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a feature map of an image, which are only known as their product.

    Args:
        positions: rows · columns of the map.
        shape: height and width of the image in any unit, as of its patches. Of the factors of `positions`, those are
            taken whose ratio is nearest to theirs.

    >>> map_shape(49, (224, 224)), map_shape(60, (96, 160)), map_shape(60, (5, 3))
    ((7, 7), (6, 10), (10, 6))
    """
    rows = [row for row in range(1, positions + 1) if positions % row == 0]
    ratio = math.log(positions * shape[0] / shape[1])
    nearest = min(rows, key=lambda row: abs(2 * math.log(row) - ratio))
    return nearest, positions // nearest


def on_grid(feature_map: Tensor, shape: tuple[int, int]) -> Tensor:
    """Resample a feature map (B, N', C) to the resolution of a grid of rows and columns, `shape`: (B, N, C).

    The resampling is bilinear with antialiasing. From 2 × 2 positions to a single patch, which is their mean:

    >>> on_grid(torch.tensor([[[1.0], [2.0], [3.0], [6.0]]]), shape=(1, 1)).round(decimals=4).tolist()
    [[[3.0]]]
    """
    own = map_shape(feature_map.shape[1], shape)
    if own == shape:
        return feature_map
    return (
        F.interpolate(feature_map.float().mT.unflatten(-1, own), shape, mode="bilinear", antialias=True).flatten(2).mT
    )


def read_heatmaps(heatmaps: Any, name: str) -> Tensor:
    """Heatmaps as people hold them, a tensor, an array, or a list of either, as a tensor of float32 or float64.

    >>> read_heatmaps([np.eye(2), [[1, 2], [3, 4]]], "mine").shape
    torch.Size([2, 2, 2])
    """
    try:
        if not isinstance(heatmaps, Tensor):
            rows = [each.detach().cpu() if isinstance(each, Tensor) else each for each in heatmaps]
            heatmaps = torch.as_tensor(np.stack([np.asarray(each) for each in rows]))
    except (TypeError, ValueError) as error:
        got = type(heatmaps).__name__
        raise InputError(
            f"expected heatmaps of one size from {name}, a tensor, an array or a list, got {got}"
        ) from error
    return heatmaps.detach() if heatmaps.dtype in (torch.float32, torch.float64) else heatmaps.detach().float()


def neighbourhoods(grid: PatchGrid, hops: int) -> Tensor:
    """Compute N(z) of every patch z: the patches at most `hops` steps away, diagonals included (TVE, Section 2).

    Returns:
        Boolean, (N, N). Row z is True on N(z); `hops=0` gives the identity matrix.

    The neighbourhood of the upper left patch in a grid of 3 × 3 patches:

    >>> neighbourhoods(PatchGrid(image_size=3, patch_size=1), hops=1)[0].int().view(3, 3).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    """
    check_range(0, hops=hops)
    index = torch.arange(grid.num_patches)
    row, column = index // grid.shape[1], index % grid.shape[1]
    distance = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
    return distance <= hops


def check_hops(hops: Sequence[int]) -> None:
    """Raise an InputError unless `hops` holds one or more distinct radii of N(z), in patches, each 0 or more."""
    if not hops or min(hops) < 0:
        raise InputError(f"expected hops, one or more radii of at least 0 patches, such as [2], got {list(hops)}")
    check_distinct(hops=hops)


def select_most_important(order: Tensor, levels: int, until: float = 1.0) -> Tensor:
    """Compute S*, the ⌊s·N⌋ most important patches, at Q equally spaced sparsities s from 0 to `until`.

    Args:
        order: patch numbers of each image, the most important first, (B, N).
        levels: Q, see `level_sizes`.
        until: see `level_sizes`.

    Returns:
        Boolean, (B, Q, N), True on S*.

    >>> select_most_important(torch.tensor([[1, 2, 3, 0]]), levels=3).int().tolist()
    [[[0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]]
    """
    rank = order.argsort(-1)  # (B, N), 0 is the most important
    return rank[:, None] < level_sizes(order.shape[-1], levels, until).to(order.device)[:, None]


def level_sizes(num_patches: int, levels: int, until: float = 1.0) -> Tensor:
    """Compute |S*| = ⌊s·N⌋ at Q = `levels` equally spaced sparsities s from 0 to `until`: integers, (Q,).

    Integer arithmetic avoids the rounding of floats, which would lose a patch at some levels. The last level is
    `until` · N, rounded to a whole patch.

    >>> level_sizes(num_patches=7, levels=3).tolist(), level_sizes(num_patches=8, levels=3, until=0.5).tolist()
    ([0, 3, 7], [0, 2, 4])
    """
    check_range(2, levels=levels)
    largest = round(until * num_patches)
    if not 1 <= largest <= num_patches:
        raise InputError(f"expected until from 1/{num_patches}, which is one patch, to 1, got until={until}")
    return torch.arange(levels) * largest // (levels - 1)


def mask_pixels(images: Tensor, keep: Tensor, grid: PatchGrid, fill: Tensor | float = 0.0) -> Tensor:
    """Set hidden patches to `fill`; 0 is the mean pixel of a normalised image (TVE, Section 2).

    Args:
        images: normalised images, (B, C, H, W).
        keep: visible patches, one mask for each image, boolean (B, N).
        grid: the patches of an image.
        fill: value of hidden pixels: one number, or one for each channel, (C, 1, 1).

    Returns:
        The masked images, (B, C, H, W).

    >>> images, keep = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([[True, False, False, True]])
    >>> mask_pixels(images, keep, PatchGrid(image_size=2, patch_size=1)).tolist()
    [[[[1.0, 0.0], [0.0, 4.0]]]]
    """
    grid.check(images)
    return torch.where(visible_pixels(keep, grid), images, fill)


def visible_pixels(keep: Tensor, grid: PatchGrid) -> Tensor:
    """Which pixels are in visible patches, `keep`, boolean (B, N): boolean, (B, 1, H, W)."""
    visible = keep.unflatten(-1, (1, *grid.shape))
    return visible.repeat_interleave(grid.patch_size, -1).repeat_interleave(grid.patch_size, -2)


def masked_forward(
    function: Callable[[Tensor], Tensor],
    images: Tensor,
    keep: Tensor,
    grid: PatchGrid,
    fill: Tensor | float = 0.0,
    chunk_size: int = 256,
) -> Tensor:
    """Apply a function of images (b, C, H, W) → (b, ...) to every image under each of its M masks, (B, M, ...).

    Args:
        function: function of normalised images.
        images: normalised images, (B, C, H, W).
        keep: visible patches, boolean (B, M, N).
        grid: the patches of an image.
        fill: value of hidden pixels, see `mask_pixels`.
        chunk_size: maximum number b of masked images in one call, which bounds the memory.

    Sum the pixels of the upper row, and the last pixel alone:

    >>> images = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> keep = torch.tensor([[[True, True, False, False], [False, False, False, True]]])
    >>> masked_forward(lambda masked: masked.sum((1, 2, 3)), images, keep, PatchGrid(2, 1)).tolist()
    [[3.0, 4.0]]
    """
    return apply_in_chunks(lambda seen, masks: function(mask_pixels(seen, masks, grid, fill)), images, keep, chunk_size)


def apply_in_chunks(
    function: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    keep: Tensor,
    chunk_size: int = 256,
    by_size: bool = False,
) -> Tensor:
    """Apply `function` to all pairs of an image and one of its M masks, at most `chunk_size` pairs at a time.

    Args:
        function: function of images (b, C, H, W) and their masks (b, N) → (b, ...).
        images: the images, (B, C, H, W), on any scale.
        keep: visible patches, boolean (B, M, N).
        chunk_size: maximum number b of pairs in one call.
        by_size: if True, all masks of one call have the same number of visible patches.

    Returns:
        The results of `function`, (B, M, ...).

    >>> keep = torch.tensor([[[True, True], [False, True], [True, False]]])
    >>> images = torch.zeros(1, 3, 2, 2)
    >>> apply_in_chunks(lambda images, masks: masks.sum(1) + 10 * len(masks), images, keep, by_size=True)
    tensor([[12, 21, 21]])
    """
    check_positive(chunk_size=chunk_size)
    masks = keep.flatten(0, 1)
    order, groups = torch.arange(len(masks), device=keep.device), [len(masks)]
    if by_size:
        sizes = masks.sum(-1)
        order, groups = sizes.argsort(stable=True), [count for count in sizes.bincount().tolist() if count]
    chunks = [chunk for group in order.split(groups) for chunk in group.split(chunk_size)]
    parts = []
    for chunk in chunks:
        parts.append(function(images[chunk // keep.shape[1]], masks[chunk]))
        advance(len(chunk))
    outputs = torch.cat(parts)
    return (outputs[order.argsort()] if by_size else outputs).unflatten(0, keep.shape[:2])


def is_constant(heatmaps: Tensor) -> Tensor:
    """Whether all patches of each heatmap (B, rows, columns) have the same value, but for rounding: boolean (B,)."""
    flat = heatmaps.flatten(1)
    return flat.std(1, correction=0) <= 1e-6 * flat.abs().amax(1)
