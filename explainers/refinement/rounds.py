"""Which coalitions are masked next: in rounds, each of which knows what the rounds before it found."""

from typing import Literal

import torch
from torch import Tensor

from explainers.errors import InputError, check_integers, check_positive, checks_choices
from explainers.refinement.coalitions import ranked_coalitions
from explainers.sampling import stream
from explainers.shapley.coalition_draws import shapley_coalitions, shapley_weights

Draw = Literal["ranking", "regions", "shapley"]
FIRST = 8
"""Number of pairs in the first round. Every later round has as many as all rounds before it."""
FEWEST = 8
"""Smallest number of passes. The fit of fewer has no pair left that tells the size of the prior, or of the errors."""
EARLIEST = 64
"""Smallest number of passes at which a tolerance may stop. Heatmaps of fewer are mostly the prior's, times its size."""
POWER = 0.5  # of `shapley_coalitions`, with the smallest variance
NOISE = 1.5  # of `ranked_coalitions`, in standard deviations of the ranked scores
TEMPERATURE = 2.0  # of the score of a class, see `score_functionals`


def check_passes(**numbers: int) -> None:
    """Raise an InputError for the first number of passes that is not even, or below `FEWEST`.

    >>> check_passes(passes=4)
    Traceback (most recent call last):
    explainers.errors.InputError: expected at least 8 passes, because fewer cannot tell the size of the prior, got \
passes=4: take 16
    """
    check_integers(**numbers)
    for name, number in numbers.items():
        if number < FEWEST:
            raise InputError(
                f"expected at least {FEWEST} passes, because fewer cannot tell the size of the prior, got"
                f" {name}={number}: take {2 * FEWEST}"
            )
    check_pairs(**numbers)


def check_pairs(**numbers: int) -> None:
    """Raise an InputError for the first number of passes that is not even and above 0."""
    check_integers(**numbers)
    check_positive(**numbers)
    for name, number in numbers.items():
        if number % 2:
            raise InputError(
                f"expected an even number of passes, two for each pair of masked images, got {name}={number}: take"
                f" {number + 1}"
            )


def round_of(pair: int) -> tuple[int, int]:
    """The first pair of the round of a pair, and that of the next round.

    >>> [round_of(pair) for pair in (0, 7, 8, 16, 33)]
    [(0, 8), (0, 8), (8, 16), (16, 32), (32, 64)]
    """
    start = 0
    end = FIRST
    while pair >= end:
        start = end
        end = 2 * end
    return start, end


@checks_choices
def draw_coalitions(fit: Draw, first: int, last: int, scores: Tensor, noise: float, seed: int) -> Tensor:
    """Draw the coalitions with the numbers `first` to `last` − 1, boolean (B, M, N).

    They depend on these numbers, the scores and the seed alone. Images with equal scores get equal coalitions.
    For other arguments see `refine`.

    Args:
        first: number of the first coalition.
        last: number after that of the last coalition.
        scores: scores of the patches that the passes so far give, (B, N); read by `ranking`.
        noise: see `ranked_coalitions`.
    """
    seed = stream("coalitions", seed, 0)
    if fit == "shapley":
        index = torch.zeros(1, dtype=torch.long, device=scores.device)
        keep = shapley_coalitions(index, scores.shape[-1], last, seed, paired=False, power=POWER)
        return keep[:, first:].expand(len(scores), -1, -1)
    numbers = torch.arange(first, last, device=scores.device)
    return ranked_coalitions(numbers, torch.zeros_like(scores) if fit == "regions" else scores, noise, seed)


@checks_choices
def pair_weights(fit: Draw, keep: Tensor) -> Tensor | None:
    """Weights of the pairs in the fit, (B, M); `None` for equal ones."""
    return shapley_weights(keep, POWER) if fit == "shapley" else None
