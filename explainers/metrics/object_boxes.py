"""Object localization by boxes: whether the box around the hottest region is that of the object."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, needs
from explainers.metrics.means import PerImage, moments

THRESHOLDS = tuple(step / 20 for step in range(20))
"""Scores, relative to the range of a heatmap, from which on pixels are in a region."""

NEIGHBOURS = np.ones((3, 3))  # pixels that touch at a corner are one region

Corners = tuple[int, int, int, int]  # first row, first column, last row + 1, last column + 1


def check_truth(heatmaps: Tensor, truth: Tensor) -> None:
    """Raise an InputError unless there is one boolean `truth` (H, W) for each heatmap."""
    if truth.dtype != torch.bool or truth.dim() != 3 or len(truth) != len(heatmaps):
        kind = str(truth.dtype).removeprefix("torch.")
        raise InputError(
            f"expected truth as the pixels of the object in each of {len(heatmaps)} images, bool of shape"
            f" [{len(heatmaps)}, H, W], got {kind} of shape {list(truth.shape)}: give one mask for each image"
        )


def box_hits(heatmaps: Tensor, truth: Tensor, thresholds: Sequence[float] = THRESHOLDS) -> Tensor:
    """Test whether the box around the largest region of a heatmap overlaps a box of the object with an IoU of 0.5.

    Heatmaps are up-sampled by bilinear interpolation and scaled to [0, 1] by their own minimum and maximum. A region is
    connected pixels from a threshold on (Zhou et al., 2016, with 0.2). The boxes of the object are those around each of
    its connected regions in `truth`: boxes that touch or overlap are one.

    Args:
        heatmaps: (B, P, P), higher is more important.
        truth: True in the boxes of the object, or on its mask, boolean (B, H, W).
        thresholds: T numbers in [0, 1].

    Returns:
        float64, (B, T), 1 or 0; NaN for an image without an object.

    Raises:
        InputError: unless there is one boolean `truth` for each heatmap.

    The object is the left quarter. From 0 on, the box is the whole image; from 0.5 on, it is the left half:

    >>> truth = torch.tensor([[True, False, False, False]]).repeat(4, 1)[None]
    >>> box_hits(torch.tensor([[[1, 0], [1, 0]]]), truth, [0, 0.5]).tolist()
    [[0.0, 1.0]]
    """
    check_truth(heatmaps, truth)
    # Subtract the minimum first: interpolation may round equal scores to unequal ones, unless they are 0
    scores = heatmaps.double() - heatmaps.double().amin((1, 2), keepdim=True)
    scores = F.interpolate(scores[:, None], truth.shape[1:], mode="bilinear")[:, 0]
    lowest = scores.amin((1, 2), keepdim=True)
    highest = scores.amax((1, 2), keepdim=True)
    scaled = ((scores - lowest) / (highest - lowest).clamp(min=1e-300)).cpu().numpy()
    hits = torch.full((len(heatmaps), len(thresholds)), torch.nan, dtype=torch.double)
    for image, (pixels, mask) in enumerate(zip(scaled, truth.cpu().numpy(), strict=True)):
        objects = [box for box, _ in regions(mask)]
        for column, threshold in enumerate(thresholds if objects else ()):
            box, _ = max(regions(pixels >= threshold), key=lambda region: region[1], default=((0, 0, 0, 0), 0))
            hits[image, column] = max(overlap(box, other) for other in objects) >= 0.5
    return hits.to(heatmaps.device)


def regions(mask: np.ndarray) -> list[tuple[Corners, int]]:
    """The box around each connected region of a mask, boolean (H, W), and the number of its pixels."""
    needs("scipy", "methods", "box accuracy")
    from scipy import ndimage  # here, because explaining images does without it

    labels, _ = ndimage.label(mask, NEIGHBOURS)
    sizes = np.bincount(labels.flatten())[1:].tolist()
    boxes = [(rows.start, columns.start, rows.stop, columns.stop) for rows, columns in ndimage.find_objects(labels)]
    return list(zip(boxes, sizes, strict=True))


def overlap(first: Corners, second: Corners) -> float:
    """Intersection over union of two boxes.

    >>> overlap((0, 0, 2, 2), (0, 1, 2, 3))
    0.3333...
    """
    rows = min(first[2], second[2]) - max(first[0], second[0])
    columns = min(first[3], second[3]) - max(first[1], second[1])
    both = max(rows, 0) * max(columns, 0)
    areas = [(bottom - top) * (right - left) for top, left, bottom, right in (first, second)]
    return both / (sum(areas) - both)


class BoxAccuracy(PerImage):
    """MaxBoxAcc (Choe et al., 2020): mean of `box_hits` over images, at the threshold at which this mean is highest.

    With heatmaps of the labelled class, it is GT-known localization. Images with an empty `truth` are left out.
    """

    columns = {"box_accuracy": "Box accuracy ↑"}
    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(width=len(THRESHOLDS))

    def update(self, heatmaps: Tensor, truth: Tensor) -> None:
        """Add images, with the arguments of `box_hits`."""
        self.keep(box_hits(heatmaps, truth))

    def named(self, name: str, rows: Tensor) -> dict[str, Tensor]:
        return {"box_accuracy": rows[:, rows.nanmean(0).nan_to_num().argmax()]}

    def compute(self) -> dict[str, Tensor]:
        hits = self.named("", self.rows())["box_accuracy"]
        mean, _, error = (number[0] for number in moments(hits[:, None]))
        return {"box_accuracy": mean, "box_accuracy_error": error}
