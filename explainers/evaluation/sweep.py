"""The perturbation sweep: removes patches or pixels in the order of heatmaps."""

import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.evaluation.evaluation import Evaluation
from explainers.masking import Removal
from explainers.metrics.curves import find_needed_sides
from explainers.metrics.perturbation import importance_order, inner_levels, perturbation_sweep
from explainers.models import TargetModel
from explainers.models.removal import check_removal, masked_outputs


def bilinear(heatmaps: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale heatmaps (B, rows, columns) up to pixels (B, H, W), `size`, by bilinear interpolation.

    Pixels between patches of equal scores get exactly this score, so they stay ties and are removed in random order.
    The rounded weights of `F.interpolate` would order them.

    >>> bilinear(torch.tensor([[[0.0, 8.0], [0.0, 8.0]]]), size=(4, 4))[0, :2].tolist()
    [[0.0, 2.0, 6.0, 8.0], [0.0, 2.0, 6.0, 8.0]]
    """
    for dim, pixels in enumerate(size, 1):
        side = heatmaps.shape[dim]
        position = ((torch.arange(pixels, dtype=torch.double) + 0.5) * side / pixels - 0.5).clamp(0, side - 1)
        low = position.long()
        weight = (position - low).to(heatmaps).view(-1, 1) if dim == 1 else (position - low).to(heatmaps)
        low, high = (each.to(heatmaps.device) for each in (low, (low + 1).clamp(max=side - 1)))
        heatmaps = heatmaps.index_select(dim, low).lerp(heatmaps.index_select(dim, high), weight)
    return heatmaps


class Sweep:
    """Removes the patches or pixels of images in the order of heatmaps, and records the outputs of the target.

    Args:
        target: the model to perturb.
        settings: grid, curves, levels and order.
        removal: what replaces removed patches, see `Removal`.

    Raises:
        InputError: if the target does not support this removal, or the removal is of patches only.
    """

    def __init__(self, target: TargetModel, settings: Evaluation, removal: Removal = "zero") -> None:
        check_removal(target, removal)
        if removal == "drop" and settings.order != "patches":
            raise InputError(
                f"expected order=patches with removal drop, got {settings.order}: a dropped token is a whole patch"
            )
        self.target = target
        self.settings = settings
        self.removal = removal
        self.sides = find_needed_sides(settings.curves)

    @property
    def forward_passes(self) -> int:
        """Masked forward passes for each image and explainer."""
        return sum(self.sides) * inner_levels(self.settings.levels, self.settings.until)

    def logits(self, normalised: Tensor, keep: Tensor) -> Tensor:
        """Logits of normalised images (B, C, H, W) under masks (B, M, N) of what is removed."""
        masks = keep, self.settings.removed, self.removal, self.settings.chunk_size
        return masked_outputs(self.target, self.target.classify, normalised, *masks)

    def empty(self, normalised: Tensor) -> Tensor:
        """Logits of an image of which nothing is visible, (1, K), which are the same for all images."""
        hidden = torch.zeros(1, 1, self.settings.removed.num_patches, dtype=torch.bool, device=normalised.device)
        return self.logits(normalised[:1], hidden)[0]

    def __call__(
        self, normalised: Tensor, heatmaps: Tensor, index: Tensor, classes: Tensor, labels: Tensor, whole: Tensor
    ) -> Tensor:
        """The `perturbation_sweep` of images.

        Args:
            normalised: images, (B, C, H, W).
            heatmaps: what is ranked, (B, rows, columns) or (B, H, W); of equal scores, see `importance_order`.
            index: index of each image in the data set, (B,).
            classes: the explained class of each image, (B,).
            labels: the label of each image, (B,), −1 if it is unknown.
            whole: logits of the images and of an empty one, (B, 2, K).
        """
        scores, own = heatmaps.float(), self.settings
        if scores.shape[1:] != own.removed.shape:
            scores = bilinear(scores, own.removed.shape)
        order = importance_order(scores.flatten(1), index)
        settings = own.levels, labels, whole, self.sides, own.until, self.target.score
        return perturbation_sweep(lambda keep: self.logits(normalised, keep), order, classes, *settings)
