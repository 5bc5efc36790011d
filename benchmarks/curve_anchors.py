"""Heatmaps of other people's estimators and searches of single images; `benchmarks/curve.py` uses them.

Estimators are those of the package shapiq (extra `peers`), on the games of patches of KernelSHAP and LIME: the score of
a set is the probability of the class. They sample anew for every number of passes, as their users would. A set that one
of them asks for twice counts as one pass.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.curve_heatmaps import Batch, Heatmaps
from benchmarks.curve_searches import Game, Sets, search_both_ends, search_by_phases
from explainers.evaluation.passes import explain
from explainers.models.removal import masked_scores

Spent = dict[int, list[int]]
"""Key of the heatmaps → passes of every image."""
ASKED = 0
"""Key of heatmaps whose number of passes is not chosen."""
SIDE = 2
"""Patches along a side of the square regions that are searched: 49 regions of a grid of 14 × 14."""
ESTIMATORS: dict[str, tuple[str, dict[str, Any], int]] = {
    "shapiq-KernelSHAP": ("KernelSHAP", {"pairing_trick": True}, 3),
    "shapiq-Permutations": ("PermutationSamplingSV", {}, 0),
    "shapiq-ProxySPEX": ("ProxySPEX", {"index": "SV", "max_order": 1}, 64),
}
"""Name → class of shapiq, its arguments, and the least passes; 0: those of one permutation."""


def play(batch: Batch, image: int, regions: Tensor) -> Game:
    """The game of the regions of one image; `regions` is the number of each patch's region, (N,)."""
    normalised = batch.target.normalise(batch.images[image : image + 1])
    classes = batch.classes[image : image + 1]

    @torch.no_grad()
    def score(sets: Sets) -> NDArray[np.float64]:
        keep = torch.from_numpy(sets)[None, :, regions]
        found = masked_scores(batch.target, normalised, classes, keep, batch.grid, batch.removal, batch.chunk_size)
        return found[0].double().numpy()

    return Game(score)


def estimate(name: str, batch: Batch, seed: int = 0) -> tuple[Heatmaps, Spent]:
    """Shapley values by an estimator of shapiq, for every number of passes that it can make."""
    players = batch.grid.num_patches
    approximator, arguments, least = ESTIMATORS[name]
    build = getattr(import_module("shapiq.approximator"), approximator)
    games = [play(batch, image, torch.arange(players)) for image in range(len(batch.images))]
    heatmaps, spent = {}, {}
    for passes in (each for each in batch.passes if each >= (least or players + 1)):
        asked = [Game(game) for game in games]  # which compute only what other numbers of passes did not ask for
        found = [build(n=players, random_state=seed, **arguments).approximate(passes, game) for game in asked]
        values = [[each[(player,)] for player in range(players)] for each in found]
        heatmaps[passes] = batch.on_grid(torch.tensor(values).float())
        spent[passes] = [game.passes for game in asked]
    return heatmaps, spent


def square_regions(batch: Batch) -> Tensor:
    """Number of the square region of every patch, (N,)."""
    rows, columns = batch.grid.shape
    row, column = torch.arange(rows) // SIDE, torch.arange(columns) // SIDE
    return (row[:, None] * (-(-columns // SIDE)) + column).flatten()


def search(order: Callable[[Game, int], list[int]], batch: Batch) -> tuple[Heatmaps, Spent]:
    """Ranks of the square regions in the order that a search finds, the largest first."""
    regions = square_regions(batch)
    count = int(regions.max()) + 1
    ranks, spent = [], []
    for image in range(len(batch.images)):
        game = play(batch, image, regions)
        found = torch.tensor(order(game, count))
        ranks.append((count - found.argsort()).float()[regions])
        spent.append(game.passes)
    return {ASKED: batch.on_grid(torch.stack(ranks))}, {ASKED: spent}


def explain_once(method: Any, batch: Batch) -> tuple[Heatmaps, Spent]:
    """Heatmaps of an explainer as it is, and its counted forward passes; backward passes are not counted."""
    explanation, passes, _, _ = explain(method, batch.target, batch.images, batch.classes)
    count = len(batch.images)
    return {ASKED: explanation.heatmaps.detach()}, {ASKED: [passes // count] * count}


ANCHORS: dict[str, Callable[[Batch], tuple[Heatmaps, Spent]]] = {
    **{name: partial(estimate, name) for name in ESTIMATORS},
    "LiMA": partial(search, search_both_ends),
    "PhaseWin": partial(search, search_by_phases),
}
"""Name → heatmaps and passes of what is neither a prior nor refined."""
