"""The order of patches that a greedy search finds best for deletion and insertion: an upper anchor of the curve."""

from collections.abc import Callable

import torch
from torch import Tensor

from explainers.errors import check_positive, check_range, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.posthoc.masks import MaskMethod


def candidate_counts(num_patches: int, candidates: int, step: int) -> list[int]:
    """Count the patches that each step of `greedy_order` tries: first all, then at most `candidates` of the remaining.

    >>> candidate_counts(num_patches=9, candidates=5, step=2)
    [9, 5, 5, 3, 1]
    """
    return [num_patches] + [min(candidates, num_patches - chosen) for chosen in range(step, num_patches, step)]


def greedy_order(
    value: Callable[[Tensor], Tensor],
    batch: int,
    num_patches: int,
    candidates: int,
    step: int,
    device: torch.device | None = None,
) -> Tensor:
    """Order patches greedily: each step chooses the patches that raise the value of the chosen set most.

    The gain of patch z is value(S ∪ {z}) − value(S), where S is the set chosen before. The first step computes it
    for all patches. A later step computes it for the `candidates` whose gain was highest when last computed, and takes
    the best `step` of them. Of two patches with equal gains, the one with the lower number comes first.

    Args:
        value: sets of patches, boolean (B, M, N) → their values (B, M).
        batch: B, number of images.
        num_patches: N, number of patches of an image.
        candidates: number of patches that a step tries, at least `step`.
        step: number of patches that a step chooses.
        device: device of the sets.

    Returns:
        Patch numbers, the first chosen first, (B, N).
    """
    single = torch.eye(num_patches, dtype=torch.bool, device=device)
    chosen = torch.zeros(batch, num_patches, dtype=torch.bool, device=device)
    gains, order = torch.zeros(batch, num_patches, device=device, dtype=torch.float32), []
    for count in candidate_counts(num_patches, candidates, step):
        best = gains.masked_fill(chosen, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        tried = best[:, :count].sort(-1).values  # by number, so that the earlier of two equal patches is first
        before = chosen[:, None]  # (B, 1, N)
        values = value(torch.cat([before, before | single[tried]], 1))  # (B, 1 + count, N) → (B, 1 + count)
        gain = values[:, 1:] - values[:, :1]
        gains = gains.scatter(1, tried, gain.to(gains.dtype))
        taken = tried.gather(1, gain.argsort(dim=-1, descending=True, stable=True)[:, :step])
        chosen = chosen.scatter(1, taken, True)
        order.append(taken)
    return torch.cat(order, 1)


class GreedyOrder(MaskMethod):
    """The order of patches that a greedy search finds best for deletion and insertion together.

    Tables list it as a reference: it shows which values of these metrics an order of patches can reach. A better order
    can exist, so it is no upper bound. It is no method for users either, because it maximises the metric that compares
    explainers, and hides patches by the same `removal`. Heatmaps contain ranks: 1 for the first patch, then
    (N − 1) / N, ..., and 1 / N for the last.

    `greedy_order` maximises the value f(y | only S) − f(y | all but S), where f is the probability of the class and S
    the set of the patches chosen so far. The mean of this value over the sizes of S is the area under the insertion
    curve minus the area under the deletion curve, LeRF − MoRF of TRACE (Wang & Wang, 2024). TRACE reports that an order
    searched for deletion alone is bad at insertion.

    Args:
        candidates: number of patches that a step tries, each in two forward passes; at least `step`.
        step: number of patches that a step chooses; `None` for N / 20, rounded up, and at most `candidates`.
    """

    signed = False

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        removal: Removal = "zero",
        candidates: int = 28,
        step: int | None = None,
        chunk_size: int = 256,
    ) -> None:
        super().__init__(target, grid, removal, chunk_size)
        check_positive(candidates=candidates)
        self.step = min(candidates, -(-grid.num_patches // 20)) if step is None else step
        check_range(1, candidates, step=self.step)
        self.candidates = candidates
        counts = candidate_counts(grid.num_patches, candidates, self.step)
        self.forward_passes = 2 * sum(1 + count for count in counts)

    def patch_scores(self, normalised: Tensor, classes: Tensor) -> Tensor:
        def value(sets: Tensor) -> Tensor:
            inserted, deleted = self.score_masks(normalised, classes, torch.cat([sets, ~sets], 1)).chunk(2, 1)
            return inserted - deleted

        patches = self.grid.num_patches
        order = greedy_order(value, len(normalised), patches, self.candidates, self.step, normalised.device)
        return (patches - order.argsort(-1)) / patches
