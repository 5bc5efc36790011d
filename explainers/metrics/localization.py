"""Localization: whether the most important patches lie on the annotated object."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, needs
from explainers.metrics.means import MeanOfImages, PerImage, moments

Localized = Literal["pointing_game", "average_precision", "segmentation", "box_accuracy"]

THRESHOLDS = tuple(step / 20 for step in range(20))
"""Scores, relative to the range of a heatmap, from which on pixels are in a region of `box_hits`."""

Corners = tuple[int, int, int, int]  # first row, first column, last row + 1, last column + 1


def check_truth(heatmaps: Tensor, truth: Tensor) -> None:
    """Raise an InputError unless there is one boolean `truth` (H, W) for each heatmap."""
    if truth.dtype != torch.bool or truth.dim() != 3 or len(truth) != len(heatmaps):
        kind = str(truth.dtype).removeprefix("torch.")
        raise InputError(
            f"expected truth as the pixels of the object in each of {len(heatmaps)} images, bool of shape"
            f" [{len(heatmaps)}, H, W], got {kind} of shape {list(truth.shape)}: give one mask for each image"
        )


def hits(heatmaps: Tensor, truth: Tensor) -> Tensor:
    """Test whether the centre of the most important patch lies in `truth` (pointing game).

    If several patches share the highest score, the result is the fraction of them whose centre is on the object.

    Args:
        heatmaps: (B, rows, columns), higher is more important.
        truth: True in the boxes of the object, or on its mask, boolean (B, H, W).

    Returns:
        (B,), in [0, 1]; NaN for an image without an object.

    Raises:
        InputError: unless there is one boolean `truth` for each heatmap.

    >>> truth = torch.zeros(2, 4, 4, dtype=torch.bool)
    >>> truth[:, 3, 3] = True
    >>> hits(torch.tensor([[[0.1, 0.2], [0.3, 0.9]], [[0.1, 0.2], [0.9, 0.9]]]), truth).tolist()
    [1.0, 0.5]
    """
    check_truth(heatmaps, truth)
    scores = heatmaps.flatten(1)
    peaks = scores == scores.amax(1, keepdim=True)
    rows, columns = (
        (2 * torch.arange(patches, device=truth.device) + 1) * size // (2 * patches)
        for patches, size in zip(heatmaps.shape[1:], truth.shape[1:], strict=True)
    )
    on_object = truth[:, rows][:, :, columns].flatten(1)  # (B, N)
    return _drop_missing((peaks & on_object).sum(1) / peaks.sum(1), truth)


def average_precision(heatmaps: Tensor, truth: Tensor) -> Tensor:
    """Compute how well each heatmap ranks the pixels of `truth` above the others (SkipPLUS).

    AP = Σ_k (recall_k − recall_(k−1)) · precision_k, for the pixels whose score is at least the k-th highest. Every
    pixel has the score of its patch (nearest-neighbour upsampling).

    For arguments see `hits`; H and W are multiples of P.

    Returns:
        float64, (B,), in [0, 1]; NaN for an image without an object.

    >>> truth = torch.tensor([False, False, True, True]).expand(1, 4, 4)
    >>> average_precision(torch.tensor([[[3, 4], [1, 2]]]), truth).tolist()
    [0.8333...]
    """
    check_truth(heatmaps, truth)
    rows, columns = heatmaps.shape[1:]
    patches = truth.unflatten(1, (rows, -1)).unflatten(-1, (columns, -1))  # (B, rows, height, columns, width)
    return _average_precision(heatmaps.flatten(1), patches.sum((2, 4)).flatten(1), patches[0, 0, :, 0].numel())


def segmentation(heatmaps: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Segment images by their heatmaps, and compare foreground and object (Chefer et al., 2021, imagenet_seg_eval.py).

    Res is the heatmap, upsampled by bilinear interpolation and scaled to [0, 1] by its own minimum and maximum. The
    foreground is Res > mean(Res). As in the released code, the average precision is not a mean over two classes. It
    ranks 2·H·W scores at once: Res, whose positives are the pixels of `truth`, and 1 − Res, whose positives are the
    others. If all scores are equal, all pixels are background and all scores tie, so the average precision is 0.5.

    For arguments see `hits`.

    Returns:
        Intersection and union of foreground and object, as fractions of the H·W pixels, and the average precision.
        float64, (B,) each; NaN for an image without an object.

    >>> truth = torch.zeros(1, 4, 4, dtype=torch.bool)
    >>> truth[0, 2:, 2:] = True
    >>> [number.item() for number in segmentation(torch.tensor([[[0, 1], [0, 1]]]), truth)]
    [0.25, 0.5, 0.6979...]
    """
    scores, lowest, highest = _upsample(heatmaps, truth)
    res = (2 * scores - lowest - highest) / (highest - lowest).clamp(min=1e-300)  # 2 · Res − 1; 0 for equal scores
    res = (res * 2**30).round().int()  # scores that differ by rounding alone become equal
    objects, foreground = truth.flatten(1), res > res.double().mean(1, keepdim=True)
    intersection, union = (area.double().mean(1) for area in (foreground & objects, foreground | objects))
    precision = _average_precision(torch.cat([res, -res], 1), torch.cat([objects, ~objects], 1))
    return _drop_missing(intersection, truth), _drop_missing(union, truth), _drop_missing(precision, truth)


def _upsample(heatmaps: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Interpolate heatmaps to the pixels of `truth`, float64 (B, H·W), with their lowest and highest values (B, 1)."""
    check_truth(heatmaps, truth)
    # Subtract the minimum first: interpolation may round equal scores to unequal ones, unless they are 0
    scores = heatmaps.double() - heatmaps.double().amin((1, 2), keepdim=True)
    scores = F.interpolate(scores[:, None], truth.shape[1:], mode="bilinear").flatten(1)
    return scores, *scores.aminmax(dim=1, keepdim=True)


def _average_precision(scores: Tensor, positives: Tensor, pixels: int = 1) -> Tensor:
    """Compute the average precision of each row, (B,); equal scores share a threshold.

    Each of the scores (B, n) belongs to a group of as many `pixels`, of which `positives` (B, n) are positive.
    """
    ordered, order = (-scores).sort(1)
    not_lower = torch.searchsorted(ordered, ordered, right=True)  # number of groups whose score is at least this
    positives = positives.gather(1, order)
    precision = positives.cumsum(1).gather(1, not_lower - 1).double() / (pixels * not_lower)
    return (positives * precision).sum(1) / positives.sum(1)


def box_hits(heatmaps: Tensor, truth: Tensor, thresholds: Sequence[float] = THRESHOLDS) -> Tensor:
    """Test whether the box around the largest region of a heatmap overlaps a box of the object with an IoU of 0.5.

    Heatmaps are up-sampled by bilinear interpolation and scaled to [0, 1] by their own minimum and maximum. A region is
    connected pixels from a threshold on (Zhou et al., 2016, with 0.2). The boxes of the object are those around each of
    its connected regions in `truth`: boxes that touch or overlap are one.

    For other arguments see `hits`.

    Returns:
        float64, (B, T), 1 or 0 for each of T thresholds in [0, 1]; NaN for an image without an object.

    >>> truth = torch.tensor([[True, False, False, False]]).repeat(4, 1)[None]
    >>> box_hits(torch.tensor([[[1, 0], [1, 0]]]), truth, [0, 0.5]).tolist()
    [[0.0, 1.0]]
    """
    scores, lowest, highest = _upsample(heatmaps, truth)
    scaled = ((scores - lowest) / (highest - lowest).clamp(min=1e-300)).view(truth.shape).cpu().numpy()
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

    labels, _ = ndimage.label(mask, np.ones((3, 3)))  # pixels that touch at a corner are one region
    sizes = np.bincount(labels.flatten())[1:].tolist()
    boxes = [(rows.start, columns.start, rows.stop, columns.stop) for rows, columns in ndimage.find_objects(labels)]
    return list(zip(boxes, sizes, strict=True))


def overlap(first: Corners, second: Corners) -> float:
    """Intersection over union of two boxes."""
    rows = min(first[2], second[2]) - max(first[0], second[0])
    columns = min(first[3], second[3]) - max(first[1], second[1])
    both = max(rows, 0) * max(columns, 0)
    areas = [(bottom - top) * (right - left) for top, left, bottom, right in (first, second)]
    return both / (sum(areas) - both)


def _drop_missing(numbers: Tensor, truth: Tensor) -> Tensor:
    """Replace the numbers (B,) of images without an object by NaN."""
    return numbers.masked_fill(~truth.flatten(1).any(1), torch.nan)


class PointingGame(MeanOfImages):
    """Hit rate: mean of `hits` over images; images with an empty `truth` are left out."""

    columns = {"pointing_game": "Hit rate ↑"}

    def update(self, heatmaps: Tensor, truth: Tensor) -> None:
        self.add(hits(heatmaps, truth))


class AveragePrecision(MeanOfImages):
    """Mean of `average_precision` over images; images with an empty `truth` are left out."""

    columns = {"average_precision": "AP ↑"}

    def update(self, heatmaps: Tensor, truth: Tensor) -> None:
        self.add(average_precision(heatmaps, truth))


class Segmentation(PerImage):
    """Pixel accuracy, mIoU and mAP of `segmentation` (Chefer et al., 2021); images with an empty `truth` are left out.

    `mean_iou` is the mean over foreground and background of Σ intersection / Σ union, with sums over images; the others
    are means over images. Standard errors, `<name>_error`, that of mIoU by the delta method, need two images.
    """

    columns = {"pixel_accuracy": "Pixel accuracy ↑", "mean_iou": "mIoU ↑", "mean_average_precision": "mAP ↑"}
    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(width=3)

    def update(self, heatmaps: Tensor, truth: Tensor) -> None:
        self.keep(torch.stack(segmentation(heatmaps, truth), 1))

    def name_numbers(self, name: str, rows: Tensor) -> dict[str, Tensor]:
        intersection, union, precision = rows.unbind(1)  # mIoU is a ratio of sums over images, of none alone
        return {"pixel_accuracy": 1 + intersection - union, "mean_average_precision": precision}

    def compute(self) -> dict[str, Tensor]:
        rows = self.rows()
        rows = rows[~rows.isnan().any(1)]
        mean = rows.mean(0)
        intersection, union, precision = mean
        outside, not_both = 1 - union, 1 - intersection  # union and intersection of the background
        results = 1 + intersection - union, (intersection / union + outside / not_both) / 2, precision
        result = dict(zip(self.columns, results, strict=True))
        if len(rows) > 1:
            gradients = torch.diag(torch.ones_like(mean))  # gradients of `results` with respect to `mean`
            gradients[0, 1] = -1
            gradients[1, 0] = (1 / union + outside / not_both.square()) / 2
            gradients[1, 1] = -(intersection / union.square() + 1 / not_both) / 2
            covariance = rows.T.cov() / len(rows)  # of `mean`
            variances = (gradients @ covariance @ gradients.T).diagonal().clamp(min=0)
            result |= {f"{name}_error": error for name, error in zip(self.columns, variances.sqrt(), strict=True)}
        return result


class BoxAccuracy(PerImage):
    """MaxBoxAcc (Choe et al., 2020): mean of `box_hits` over images, at the threshold at which this mean is highest.

    With heatmaps of the labelled class, it is GT-known localization. Images with an empty `truth` are left out.
    """

    columns = {"box_accuracy": "Box accuracy ↑"}
    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(width=len(THRESHOLDS))

    def update(self, heatmaps: Tensor, truth: Tensor) -> None:
        self.keep(box_hits(heatmaps, truth))

    def name_numbers(self, name: str, rows: Tensor) -> dict[str, Tensor]:
        return {"box_accuracy": rows[:, rows.nanmean(0).nan_to_num().argmax()]}

    def compute(self) -> dict[str, Tensor]:
        hits = self.name_numbers("", self.rows())["box_accuracy"]
        mean, _, error = (number[0] for number in moments(hits[:, None]))
        return {"box_accuracy": mean, "box_accuracy_error": error}


LOCALIZATIONS: dict[str, Any] = {
    "pointing_game": PointingGame,
    "average_precision": AveragePrecision,
    "segmentation": Segmentation,
    "box_accuracy": BoxAccuracy,
}
"""Name → metric. Its `columns` map the names of its numbers to titles in tables."""
