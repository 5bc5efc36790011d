"""Differences between explainers on the same images, with confidence intervals and corrected p-values."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from explainers.errors import needs
from explainers.metrics.means import moments

FEW = 10  # with fewer different differences than these, the sign test bounds p from below
RESOLUTION = 1e-5  # differences that are closer than this part of the largest one are equal but for rounding
CONFIDENCE = 0.95  # confidence of the intervals; a corrected p-value below 1 − `CONFIDENCE` counts as significant


@dataclass(frozen=True)
class Pairs:
    """Explainer i minus explainer j for all pairs, (n, n) each; NaN where they share fewer than two images."""

    mean: Tensor  # over the images that both have a number for
    error: Tensor  # its standard error, of the differences of single images
    half_width: Tensor  # of the confidence interval, by Student's t
    p: Tensor  # two-sided, see `paired_differences`
    corrected: Tensor  # p after Holm's correction over all pairs
    images: Tensor  # number of shared images

    @property
    def significant(self) -> Tensor:
        """Where the corrected p-value is below 0.05, boolean (n, n)."""
        return self.corrected < 1 - CONFIDENCE


def paired_differences(numbers: Tensor) -> Pairs:
    """Compare explainers in pairs, on the same images.

    The difficulty of an image cancels in a difference, so two explainers whose standard errors overlap may differ
    significantly. p is that of the paired t-test, which assumes a normal mean, as of some 30 images or more. With fewer
    than `FEW` different differences, such as those of hits, or of few images, p is at least that of the exact sign
    test: equal differences have the variance 0, and a t-test would be certain.

    Args:
        numbers: the number of each image for each explainer, (images, n); NaN where there is none.

    >>> pairs = paired_differences(torch.tensor([[10.0, 11.0], [200.0, 202.0], [3000.0, 3001.0], [5.0, 7.0]]))
    >>> pairs.mean[1, 0].item(), round(pairs.half_width[1, 0].item(), 3), round(pairs.p[1, 0].item(), 3)
    (1.5, 0.919, 0.125)
    """
    needs("scipy", "methods", "the comparison of explainers")
    from scipy.special import stdtr, stdtrit

    numbers = numbers.double()
    columns = [numbers[:, [i]] - numbers for i in range(numbers.shape[1])]  # one explainer minus all, (images, n)
    images = torch.stack([(~column.isnan()).sum(0) for column in columns])
    mean, _, error = (torch.stack(parts) for parts in zip(*map(moments, columns), strict=True))
    mean = mean.masked_fill(images < 2, torch.nan)
    free = np.maximum(images.numpy() - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = torch.from_numpy(2 * stdtr(free, -np.abs(mean.numpy() / error.numpy())))
    p = p.masked_fill((mean == 0) & (error == 0), 1.0)
    p = torch.maximum(p, torch.stack([sign_test(column) for column in columns])).fill_diagonal_(torch.nan)
    half_width = torch.from_numpy(stdtrit(free, (1 + CONFIDENCE) / 2)) * error
    first, second = torch.triu_indices(len(p), len(p), 1)
    corrected = torch.full_like(p, torch.nan)
    corrected[first, second] = corrected[second, first] = holm(p[first, second])
    return Pairs(mean, error, half_width, p, corrected, images)


def sign_test(differences: Tensor) -> Tensor:
    """Compute the two-sided p-value of the exact sign test of each column of differences (images, n): float64, (n,).

    NaN and 0 are left out. A column of at least `FEW` different values, which needs no such test, has 0.

    >>> sign_test(torch.tensor([[1.0, 0.5], [1.0, 0.5], [1.0, 0.0], [1.0, -0.5], [1.0, 0.5]])).tolist()
    [0.0625, 0.625]
    """
    needs("scipy", "methods", "the comparison of explainers")
    from scipy.special import bdtr

    rounded = differences.nan_to_num()
    rounded = (rounded / (RESOLUTION * rounded.abs().amax(0)).clamp(min=1e-300)).round()
    more, less = (rounded > 0).sum(0), (rounded < 0).sum(0)
    different = 1 + (rounded.sort(0).values.diff(dim=0) != 0).sum(0)
    p = torch.from_numpy(2 * bdtr(torch.minimum(more, less).numpy(), (more + less).numpy(), 0.5)).clamp(max=1)
    return p.masked_fill(different >= FEW, 0.0)


def holm(p: Tensor) -> Tensor:
    """Correct p-values (m,) for their number (Holm, 1979); NaN is not counted.

    The smallest of m values is multiplied by m, the next by m − 1, and so on; a value is at least the one before it.

    >>> holm(torch.tensor([0.125, 0.5, 0.25])).tolist()
    [0.375, 0.5, 0.5]
    """
    order = p.argsort()
    known = int((~p.isnan()).sum())
    factors = (known - torch.arange(len(p))).clamp(min=1)
    corrected = torch.empty_like(p)
    corrected[order] = (p[order] * factors).cummax(0).values.clamp(max=1)
    return corrected
