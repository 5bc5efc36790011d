"""Coalitions of patches to mask, in rounds, each of which knows what the rounds before it found.

They are coherent regions of the image, or regions around a ranking of the patches, or drawn as for Shapley values.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_integers, check_positive, checks_choices
from explainers.runtime.modes import to_float64
from explainers.runtime.sampling import stream, uniform
from explainers.shapley.coalition_draws import check_coalitions, shapley_coalitions, shapley_weights

Draw = Literal["ranking", "regions", "shapley"]
FIRST = 8  # number of pairs in the first round. Every later round has as many as all rounds before it
FEWEST = 8
"""Smallest number of passes. The fit of fewer has no pair left that tells the size of the prior, or of the errors."""
EARLIEST = 64
"""Smallest number of passes at which a tolerance may stop. Heatmaps of fewer are mostly the prior's, times its size."""
POWER = 0.5  # of `shapley_coalitions`, with the smallest variance
NOISE = 1.5  # of `rank_coalitions`, in standard deviations of the ranked scores
TEMPERATURE = 2.0  # of the score of a class, see `score_functionals`

GOLDEN = (math.sqrt(5) - 1) / 2  # the multiples of this number, modulo 1, are spread evenly, however many there are


def region_coalitions(index: Tensor, shape: tuple[int, int], count: int, seed: int) -> Tensor:
    """Draw coalitions of a few coherent regions: the patches where a smooth random field is highest.

    The field interpolates independent numbers, one for 2 × 2 patches. So a coalition has most patches of some objects
    and few of others, and its embedding tells more about objects than that of separate patches.

    Args:
        index: index of each image in the data set, (B,).
        shape: rows and columns of patches, at least 4 patches in all.
        count: number of coalitions for each image.
        seed: a different one for every epoch, see `sampling.stream`.

    Returns:
        Boolean, (B, count, N); True for the patches in the coalition. Sizes are uniform in 1 ... N − 1.

    >>> region_coalitions(torch.arange(500), (3, 3), count=2, seed=0).sum(-1).unique().tolist()
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    num_patches = math.prod(shape)
    check_coalitions(num_patches)
    coalition = index[:, None] * count + torch.arange(count, device=index.device)
    field, draw = smooth_fields(coalition, shape, seed)
    return _highest(field, 1 + (draw * (num_patches - 1)).long())


def rank_coalitions(numbers: Tensor, scores: Tensor, shape: tuple[int, int], noise: float, seed: int) -> Tensor:
    """Draw coalitions around rankings of the patches: those where scores and a smooth random field are highest.

    Both are scaled to mean 0 and standard deviation 1 over the patches before the field is multiplied by `noise`. Equal
    scores leave the field alone, so the coalitions are regions. Sizes are spread evenly over 1 ... N − 1.

    Args:
        numbers: number of each coalition, (M,) or (B, M); coalitions of equal numbers share the field and the size.
        scores: scores of the patches of each image, (B, N), or of each coalition, (B, M, N).
        noise: standard deviation of the field.
        seed: seed of the fields.

    Returns:
        Boolean, (B, M, N).

    >>> scores = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    >>> rank_coalitions(torch.tensor([0, 1, 3]), scores, (2, 2), noise=0.001, seed=0)[0].int().tolist()
    [[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]]
    """
    num_patches = scores.shape[-1]
    check_coalitions(num_patches)
    field, _ = smooth_fields(numbers, shape, seed)
    ranked = standardise(to_float64(scores))
    mixed = (ranked if scores.dim() == 3 else ranked[:, None]) + noise * standardise(field)
    place = to_float64(numbers) * GOLDEN % 1
    return _highest(mixed, 1 + (place * (num_patches - 1)).long().expand(len(scores), -1))


def smooth_fields(numbers: Tensor, shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Compute a smooth random field over the patches (..., N), and a number in [0, 1), for every number (...)."""
    cells = [math.ceil(side / 2) + 3 for side in shape]
    count = math.prod(cells) + 1
    draws = uniform(numbers[..., None] * count + torch.arange(count, device=numbers.device), seed)
    coarse = draws[..., 1:].reshape(-1, 1, *cells)
    # The interpolation varies more at its border, which would be drawn first
    field = F.interpolate(coarse, scale_factor=2, mode="bicubic")[..., 3 : 3 + shape[0], 3 : 3 + shape[1]]
    return field.reshape(*numbers.shape, -1), draws[..., 0]


def standardise(scores: Tensor) -> Tensor:
    """Scale scores (..., N) to mean 0 and standard deviation 1; equal scores become 0."""
    centred = scores - scores.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)


def _highest(scores: Tensor, sizes: Tensor) -> Tensor:
    """Mark as many of the highest scores (..., N) as `sizes` (...) says."""
    return scores.argsort(-1, descending=True).argsort(-1) < sizes[..., None]


def check_passes(**numbers: int) -> None:
    """Raise an InputError for the first number of passes that is not even, or below `FEWEST`."""
    check_pairs(**numbers)
    for name, number in numbers.items():
        if number < FEWEST:
            raise InputError(
                f"expected at least {FEWEST} passes, because fewer cannot tell the size of the prior, got"
                f" {name}={number}: take {2 * FEWEST}",
                name,
            )


def check_pairs(**numbers: int) -> None:
    """Raise an InputError for the first number of passes that is not even and above 0."""
    check_integers(**numbers)
    check_positive(**numbers)
    for name, number in numbers.items():
        if number % 2:
            got = f"{name}={number}: take {number + 1}"
            raise InputError(f"expected an even number of passes, two for each pair of masked images, got {got}", name)


def find_round(pair: int) -> tuple[int, int]:
    """The first pair of the round of a pair, and the first pair of the next round."""
    start, end = 0, FIRST
    while pair >= end:
        start, end = end, 2 * end
    return start, end


@checks_choices
def draw_coalitions(fit: Draw, first: int, last: int, scores: Tensor, shape: tuple[int, int], seed: int) -> Tensor:
    """Draw the coalitions with the numbers `first` to `last` − 1, boolean (B, M, N); see `refine`.

    They depend on these numbers, the seed, and for `ranking` on the scores of the patches (B, N) alone, which
    have the rows and columns of `shape`.
    """
    seed = stream("coalitions", seed, 0)
    if fit == "shapley":
        index = torch.zeros(1, dtype=torch.long, device=scores.device)
        keep = shapley_coalitions(index, scores.shape[-1], last, seed, paired=False, power=POWER)
        return keep[:, first:].expand(len(scores), -1, -1)
    numbers = torch.arange(first, last, device=scores.device)
    return rank_coalitions(numbers, torch.zeros_like(scores) if fit == "regions" else scores, shape, NOISE, seed)


@checks_choices
def weigh_pairs(fit: Draw, keep: Tensor) -> Tensor | None:
    """Weights of the pairs in the fit, (B, M); `None` for equal ones."""
    return shapley_weights(keep, POWER) if fit == "shapley" else None
