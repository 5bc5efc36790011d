"""The perturbation sweep of one target: masked forward passes, from which all curves of an explainer are computed."""

from typing import Literal

import torch
from torch import Tensor

from explainers import Details
from explainers.errors import InputError, check_positive, check_range, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.metrics.perturbation import importance_order, inner_levels, perturbation_sweep
from explainers.models import TargetModel
from explainers.models.removal import check_removal, masked_outputs

Order = Literal["patches", "pixels", "saliency"]
"""What is removed in the order of a heatmap. For `pixels`, it is scaled up to the image by bilinear interpolation;
`saliency` is the order of a method's own saliency map of pixels, or that of `pixels` for a method without one."""


@checks_choices
def ranked(explanation: Details, order: Order) -> Tensor:
    """The map that is ranked, and compared with objects: (B, H, W) for `saliency` if there is one, or (B, P, P)."""
    return explanation.heatmaps if order != "saliency" or explanation.pixels is None else explanation.pixels


def bilinear(heatmaps: Tensor, size: int) -> Tensor:
    """Scale heatmaps (B, P, P) up to pixels (B, size, size) by bilinear interpolation.

    Pixels between patches of equal scores get exactly this score, so they stay ties and are removed in random order.
    The rounded weights of `F.interpolate` would order them.

    >>> bilinear(torch.tensor([[[0.0, 8.0], [0.0, 8.0]]]), size=4)[0, :2].tolist()
    [[0.0, 2.0, 6.0, 8.0], [0.0, 2.0, 6.0, 8.0]]
    """
    for dim in (1, 2):
        side = heatmaps.shape[dim]
        position = ((torch.arange(size, dtype=torch.double) + 0.5) * side / size - 0.5).clamp(0, side - 1)
        low = position.long()
        weight = (position - low).to(heatmaps).view(-1, 1) if dim == 1 else (position - low).to(heatmaps)
        low, high = (each.to(heatmaps.device) for each in (low, (low + 1).clamp(max=side - 1)))
        heatmaps = heatmaps.index_select(dim, low).lerp(heatmaps.index_select(dim, high), weight)
    return heatmaps


class Sweep:
    """Removes the patches or pixels of images in the order of heatmaps, and records the outputs of the target.

    Args:
        target: the model to perturb.
        grid: the patches that heatmaps are of.
        removal: what replaces removed patches, see `Removal`.
        levels: number of sparsities, including 0 and `until`; at least 2.
        order: remove patches, or pixels, see `Order`.
        chunk_size: maximum number of masked images in memory.
        sides: whether to compute the removed and the preserved side, see `needed_sides`.
        until: the largest sparsity, at most 1.

    Raises:
        InputError: if the target does not support this removal, or the removal is of patches only.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        removal: Removal = "zero",
        levels: int = 21,
        order: Order = "patches",
        chunk_size: int = 256,
        sides: tuple[bool, bool] = (True, True),
        until: float = 1.0,
    ) -> None:
        check_removal(target, removal)
        check_range(2, levels=levels)
        check_positive(chunk_size=chunk_size)
        if removal == "drop" and order != "patches":
            raise InputError(f"expected order=patches with removal drop, got {order}: a dropped token is a whole patch")
        self.target = target
        self.removal = removal
        self.levels = levels
        self.order = order
        self.chunk_size = chunk_size
        self.grid = grid if order == "patches" else PatchGrid(grid.image_size, patch_size=1)
        self.patches = grid
        self.sides = sides
        self.until = until

    @property
    def forward_passes(self) -> int:
        """Masked forward passes for each image and explainer."""
        return sum(self.sides) * inner_levels(self.levels, self.until)

    def logits(self, normalised: Tensor, keep: Tensor) -> Tensor:
        """Logits of normalised images (B, C, H, W) under masks (B, M, N) of patches, or of this sweep's pixels."""
        grid = self.grid if keep.shape[-1] == self.grid.num_patches else self.patches
        return masked_outputs(self.target, self.target.classify, normalised, keep, grid, self.removal, self.chunk_size)

    def empty(self, normalised: Tensor) -> Tensor:
        """Logits of an image without any patch, (1, K), which are the same for all images."""
        hidden = torch.zeros(1, 1, self.patches.num_patches, dtype=torch.bool, device=normalised.device)
        return self.logits(normalised[:1], hidden)[0]

    def __call__(
        self, normalised: Tensor, heatmaps: Tensor, index: Tensor, classes: Tensor, labels: Tensor, whole: Tensor
    ) -> Tensor:
        """The `perturbation_sweep` of images.

        Args:
            normalised: images, (B, C, H, W).
            heatmaps: what is `ranked`; higher is more important; of equal scores, see `importance_order`.
            index: index of each image in the data set, (B,).
            classes: the explained class of each image, (B,).
            labels: the label of each image, (B,), −1 if it is unknown.
            whole: logits of the images and of an empty one, (B, 2, K).
        """
        scores = heatmaps.float()
        if self.order != "patches" and scores.shape[-1] != self.grid.image_size:
            scores = bilinear(scores, self.grid.image_size)
        order = importance_order(scores.flatten(1), index)
        return perturbation_sweep(
            lambda keep: self.logits(normalised, keep),
            order,
            classes,
            self.levels,
            labels,
            whole,
            self.sides,
            self.until,
        )
