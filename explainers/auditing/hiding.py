"""What hiding the patches of a group does to predictions, beside hiding as many others of the same images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from explainers.auditing.audit import Effect
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.removal import masked_outputs
from explainers.models.scores import log_odds
from explainers.runtime.sampling import uniform

DRAWS = 3
"""Random sets of other patches of each image."""

PASSES = DRAWS + 2
"""Forward passes of each image: as it is, without the group, and without each random set."""

Photos = Callable[[Sequence[int]], tuple[Tensor, Sequence[int]]]
"""Numbers of photos → those that can be read, uint8 (B, C, H, W) as the model takes them, and their numbers."""


@dataclass(frozen=True)
class Hiding:
    """Falls of the log-odds of the predicted class.

    Args:
        hidden: without the patches of the group.
        random: without as many others.
        difference: of both, paired by image.
        flipped: share of images that are predicted as another class without the group.
    """

    hidden: Effect
    random: Effect
    difference: Effect
    flipped: float


def hide(
    target: TargetModel,
    grid: PatchGrid,
    images: Tensor,
    numbers: Tensor,
    hidden: Tensor,
    predicted: int,
    seed: int = 0,
) -> Hiding:
    """Hide patches of images, `PASSES` forward passes each.

    Args:
        target: the model.
        grid: its patches.
        images: at least 2 images predicted as the same class, uint8 (B, C, H, W).
        numbers: of the photos, (B,), on which the random patches depend.
        hidden: patches of the group, boolean (B, N).
        predicted: the class.
        seed: of the random patches.
    """
    others = torch.stack([random_others(hidden, numbers, seed * DRAWS + draw) for draw in range(DRAWS)], 1)
    gone = torch.cat([torch.zeros_like(hidden)[:, None], hidden[:, None], others], 1)  # (B, PASSES, N)
    with torch.no_grad():
        normalised = target.normalise(images.to(target.mean.device))
        keep = ~gone.to(normalised.device)
        logits = masked_outputs(target, target.classify, normalised, keep, grid, "zero").float().cpu()
    classes = torch.full((len(images) * PASSES,), predicted)
    odds = log_odds(logits.flatten(0, 1), classes, target.score).view(len(images), PASSES).double()
    of_group, of_others = odds[:, 0] - odds[:, 1], odds[:, 0] - odds[:, 2:].mean(1)
    flipped = (logits[:, 1].argmax(-1) != predicted).double().mean().item()
    return Hiding(measure_effect(of_group), measure_effect(of_others), measure_effect(of_group - of_others), flipped)


def random_others(hidden: Tensor, numbers: Tensor, seed: int) -> Tensor:
    """Draw as many other patches of each image as are `hidden`, boolean (B, N), or all others if they are fewer."""
    counter = numbers.long()[:, None] * hidden.shape[1] + torch.arange(hidden.shape[1])
    order = uniform(counter, seed).masked_fill(hidden, torch.inf).argsort(dim=-1, stable=True).argsort(-1)
    return (order < hidden.sum(-1, keepdim=True)) & ~hidden


def measure_effect(falls: Tensor) -> Effect:
    """The mean of falls of the log-odds, one for each image, (B,), and its standard error."""
    return Effect(falls.mean().item(), falls.std().item() / math.sqrt(len(falls)), len(falls))
