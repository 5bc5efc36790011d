"""Heatmaps of explainers for several numbers of passes, with each pass computed once; `benchmarks/curve.py` uses them.

More coalitions, samples or masks of KernelSHAP, LIME and RISE begin with those of fewer, so the scores of the largest
number give the heatmaps of all others.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from explainers.evaluation.passes import explain
from explainers.masking import PatchGrid, Removal
from explainers.metrics.agreement import spearman
from explainers.models import TargetModel
from explainers.models.removal import masked_outputs, masked_scores
from explainers.posthoc.lime import fit_linear, lime_samples, sample_weights
from explainers.posthoc.masks import RandomMasks
from explainers.posthoc.soft_masks import patch_means, score_soft_masks, weighted_sums
from explainers.refinement import Refinement, refine
from explainers.refinement.coalitions import weigh_pairs
from explainers.refinement.fit import fit_pairs
from explainers.runtime.sampling import stream
from explainers.shapley.coalition_draws import shapley_coalitions
from explainers.shapley.kernel_shap import fit_shapley


@dataclass(frozen=True)
class Batch:
    """What is explained, and how."""

    target: TargetModel
    grid: PatchGrid
    images: Tensor  # uint8, (B, C, H, W)
    classes: Tensor  # to explain, (B,)
    passes: Sequence[int]  # in ascending order
    removal: Removal = "zero"
    chunk_size: int = 64
    kept: dict[str, Any] = field(default_factory=dict)  # explainer → heatmaps that do not depend on the removal

    def on_grid(self, scores: Tensor) -> Tensor:
        """Bring scores (B, N) to the grid: (B, rows, columns)."""
        return scores.unflatten(-1, self.grid.shape)


Heatmaps = dict[int, Tensor]
"""Number of passes → heatmaps, (B, rows, columns)."""
Spent = dict[int, list[int]]
"""Key of the heatmaps → passes of every image."""
ASKED = 0
"""Key of heatmaps whose number of passes is not chosen."""


def refine_heatmaps(prior: Any, batch: Batch, fit: Any = "ranking", seed: int = 0) -> tuple[Heatmaps, Refinement]:
    """Heatmaps of `refine`; 0 passes are the prior itself."""
    settings: dict[str, Any] = {"target": batch.target, "grid": batch.grid, "removal": batch.removal}
    settings |= {"fit": fit, "chunk_size": batch.chunk_size, "seed": seed}
    refinement = refine(prior, batch.images, batch.classes, min(batch.passes), **settings)
    heatmaps = {} if prior is None else {0: prior(batch.images, batch.classes).detach()}
    for passes in batch.passes:
        if passes > refinement.passes:
            refinement.more(passes - refinement.passes)
        heatmaps[passes] = refinement.heatmaps
    return heatmaps, refinement


def halves(refinement: Refinement) -> Tensor:
    """Spearman's correlation of the fits to the pairs of even and of odd number, without a prior, for each image."""
    v = refinement.functionals[:, 0].double()
    one = torch.ones(len(v), 1)
    total = None if refinement.total is None else (refinement.total * v).sum(-1, keepdim=True)
    fits = []
    for first in (0, 1):
        keep = refinement.pairs.keep[:, first::2]
        observed = refinement.pairs.differences[:, first::2].double() @ v[..., None]
        none = torch.zeros(len(keep), keep.shape[-1], 1)
        fit = fit_pairs(keep, observed, none, one, total, weigh_pairs(refinement.fit, keep))
        fits.append(fit.values[..., 0])
    return spearman(*fits)


@torch.no_grad()
def kernel_shap(batch: Batch, seed: int = 1) -> Heatmaps:
    """Heatmaps of `KernelSHAP`, with as many coalitions as passes; the whole image is one pass more."""
    count = max(batch.passes)
    index = torch.zeros(1, dtype=torch.long)
    keep = shapley_coalitions(index, batch.grid.num_patches, count, stream("coalitions", seed, 0))
    keep = keep.expand(len(batch.images), -1, -1)
    values = _scores(batch, torch.cat([keep, torch.ones_like(keep[:, :1]), torch.zeros_like(keep[:, :1])], 1))
    ends = values[:, -1:], values[:, -2:-1]
    fits = {p: fit_shapley(keep[:, :p], values[:, :p, None], *ends)[..., 0] for p in batch.passes}
    return {p: batch.on_grid(fit) for p, fit in fits.items()}


@torch.no_grad()
def lime(batch: Batch, seed: int = 0) -> Heatmaps:
    """Heatmaps of `LIME`, with as many samples as passes."""
    keep = lime_samples(max(batch.passes), batch.grid.num_patches, seed)
    scores = _scores(batch, keep.expand(len(batch.images), -1, -1))
    weights = sample_weights(batch.target.normalise(batch.images), keep, batch.grid, kernel_width=1.0)
    fits = {p: fit_linear(keep[:p], scores[:, :p], weights[:, :p], alpha=1.0) for p in batch.passes}
    return {p: batch.on_grid(fit) for p, fit in fits.items()}


@torch.no_grad()
def rise(batch: Batch, seed: int = 0) -> Heatmaps:
    """Heatmaps of `RISE`, with as many masks as passes; its soft masks have no other removal than mean pixels."""
    if "RISE" in batch.kept:
        return batch.kept["RISE"]
    count = max(batch.passes)
    masks = RandomMasks(count, size=batch.grid.size, seed=seed, device=batch.images.device)
    image = torch.arange(len(batch.images)).repeat_interleave(count)
    normalised = batch.target.normalise(batch.images)
    pairs = score_soft_masks(
        batch.target, normalised, batch.classes, image, lambda n: masks(n % count), chunk_size=batch.chunk_size
    )
    scores = pairs.view(-1, count)
    sums = {p: weighted_sums(masks, scores[:, :p], batch.chunk_size) / (0.5 * p) for p in batch.passes}
    batch.kept["RISE"] = {p: patch_means(pixels.float(), batch.grid) for p, pixels in sums.items()}
    return batch.kept["RISE"]


BASELINES: dict[str, Callable[[Batch], Heatmaps]] = {"KernelSHAP": kernel_shap, "LIME": lime, "RISE": rise}
"""Name → heatmaps of an explainer that has no prior."""


def explain_once(method: Any, batch: Batch) -> tuple[Heatmaps, Spent]:
    """Heatmaps of an explainer as it is, and its counted forward passes; backward passes are not counted."""
    explanation, passes, _, _ = explain(method, batch.target, batch.images, batch.classes)
    count = len(batch.images)
    return {ASKED: explanation.heatmaps.detach()}, {ASKED: [passes // count] * count}


def _scores(batch: Batch, keep: Tensor) -> Tensor:
    """The probability of the class under masks (B, M, N): (B, M)."""
    normalised = batch.target.normalise(batch.images)
    return masked_scores(batch.target, normalised, batch.classes, keep, batch.grid, batch.removal, batch.chunk_size)


def seconds(explainer: Any, batch: Batch, rounds: int = 3) -> dict[str, list[list[float]]]:
    """Number of passes → seconds of `refine`, and of its masked passes alone, of every round; of 4 images."""
    taken: dict[str, list[list[float]]] = {}
    batch = replace(batch, images=batch.images[:4], classes=batch.classes[:4])
    normalised = batch.target.normalise(batch.images)
    settings: dict[str, Any] = {"removal": batch.removal, "chunk_size": batch.chunk_size}
    for passes in batch.passes:
        for _ in range(rounds if passes <= 256 else 0):
            start = time.perf_counter()
            refinement = refine(explainer, batch.images, batch.classes, passes, **settings)
            _ = refinement.heatmaps
            middle = time.perf_counter()
            keep = torch.cat([refinement.pairs.keep, ~refinement.pairs.keep], 1)
            with torch.no_grad():
                masked_outputs(batch.target, nn.Identity(), normalised, keep, batch.grid, **settings)
            durations = [middle - start, time.perf_counter() - middle]
            taken.setdefault(str(passes), []).append(durations)
    return taken
