"""Ordered searches for subsets of regions, by the probability of a class: LiMA's and PhaseWin's, for one image each.

Both evaluate a set S of regions by two passes, of S alone and of all other regions. They order all regions; the first
is the most important. The authors search 50 superpixels of SLICO; here the caller says what a region is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Sets = NDArray[np.bool_]
"""Sets of n players, (m, n)."""


@dataclass
class Game:
    """A score of sets of players, (m, n) → (m,), that computes every set once; `passes` is how many it computed."""

    score: Callable[[Sets], NDArray[np.float64]]
    known: dict[bytes, float] = field(default_factory=dict)

    @property
    def passes(self) -> int:
        return len(self.known)

    def __call__(self, sets: Sets) -> NDArray[np.float64]:
        sets = np.atleast_2d(sets).astype(bool)
        keys = [np.packbits(row).tobytes() for row in sets]
        missing = {key: row for key, row in zip(keys, sets, strict=True) if key not in self.known}
        if missing:
            scores = self.score(np.stack(list(missing.values())))
            self.known.update(zip(missing, scores.tolist(), strict=True))
        return np.array([self.known[key] for key in keys])


def join_each(chosen: list[int], candidates: list[int], count: int) -> Sets:
    """The set of the chosen players and one candidate, for each candidate, (candidates, count)."""
    sets = np.zeros((len(candidates), count), dtype=bool)
    sets[:, chosen] = True
    sets[np.arange(len(candidates)), candidates] = True
    return sets


def search_both_ends(
    game: Game, count: int, pending: int = 8, consistency: float = 20.0, collaboration: float = 5.0
) -> list[int]:
    """Order players by LiMA's bidirectional greedy search (Chen et al., 2025, arXiv 2504.00470).

    A set S is worth `consistency` · p(S) + `collaboration` · (1 − p(all but S)), with the weights of the authors' code
    for models of one modality. A step adds the player with the largest value to the front. Of the `pending` players
    with the smallest values there, it adds to the back the one with the smallest value together with the players at the
    back. While at most `pending` players are left, the front alone grows. Not built: the score of confidence, the
    entropy of all classes, whose weight is 0.01 in that code.
    """

    def worth(chosen: list[int], candidates: list[int]) -> NDArray[np.float64]:
        sets = join_each(chosen, candidates, count)
        inside, outside = np.split(game(np.concatenate([sets, ~sets])), 2)
        return consistency * inside + collaboration * (1 - outside)

    front: list[int] = []
    back: list[int] = []
    left = list(range(count))
    while left:
        values = worth(front, left)
        best = left[values.argmax()]
        worst = [left[i] for i in values.argsort(kind="stable")[:pending] if left[i] != best]
        if len(left) > pending and worst:
            back.append(worst[worth(back, worst).argmin()])
            left.remove(back[-1])
        front.append(best)
        left.remove(best)
    return front + back[::-1]


def search_by_phases(
    game: Game, count: int, window: float = 0.3, pruned: float = 0.05, accepted: float = 0.6, batched: float = 0.99
) -> list[int]:
    """Order players by PhaseWin's phases and windows (Gu et al., 2025, arXiv 2511.10914 and 2606.18008).

    The gain of a player is what it adds to p(S) − p(all but S), where S are the players chosen so far. A phase takes
    the player of the largest gain of all, then computes all gains again, of which G is the largest. Players below
    `pruned` · G leave the search; those of at least `accepted` · G enter a queue in the order of their gains. Of its
    first `window` · `count` players, `_search_window` chooses some. A search ends when no gain is positive; what is
    left follows in the order of its gains, then what was pruned. The defaults are those of the authors' code, as are
    the conditions in `_search_window`. Not built: the random deferral of players that enter a window late.
    """

    def gains(chosen: list[int], candidates: list[int]) -> NDArray[np.float64]:
        sets = join_each(chosen, [*candidates, *chosen[:1]], count)  # the last one is S itself, where it is not empty
        inside, outside = np.split(game(np.concatenate([sets, ~sets])), 2)
        values = inside - outside
        return values[:-1] - values[-1] if chosen else values - nothing

    none, every = game(np.array([[False] * count, [True] * count]))
    nothing = none - every
    chosen: list[int] = []
    left, dropped = list(range(count)), []
    width = max(1, int(window * count))
    while left:
        first = gains(chosen, left)
        if first.max() <= 0:
            break
        chosen.append(left.pop(int(first.argmax())))
        found = gains(chosen, left) if left else first[:0]
        if not left or found.max() <= 0:
            continue
        of_player = dict(zip(left, found.tolist(), strict=True))
        largest = found.max()
        dropped += [each for each in left if of_player[each] < pruned * largest]
        queue = sorted((p for p in left if of_player[p] >= accepted * largest), key=lambda p: -of_player[p])
        between = [each for each in left if pruned * largest <= of_player[each] < accepted * largest]
        start = float(first.max())
        left = _search_window(gains, chosen, queue, width, start, accepted * largest, batched) + between
    for rest in (left, dropped):
        chosen += [rest[i] for i in (-gains(chosen, rest)).argsort(kind="stable")] if rest else []
    return chosen


def _search_window(
    gains: Callable[[list[int], list[int]], NDArray[np.float64]],
    chosen: list[int],
    queue: list[int],
    width: int,
    start: float,
    threshold: float,
    batched: float,
    jump: float = 0.02,
    close: float = 0.98,
) -> list[int]:
    """Choose players from the window at the front of a queue until none reaches the threshold; return the others.

    All players are chosen whose gains reach the threshold and `batched` times the largest of the window. Where gains
    fall faster than before, g′ / g − g″ / g′ > `jump` for a gain g and the two before it, the phase ends, with this
    player if g ≥ `close` · g′.
    """
    before: float | None = None
    previous = start
    while queue:
        window = queue[:width]
        found = gains(chosen, window)
        cut = max(threshold, batched * found.max())
        passing = [(player, gain) for player, gain in zip(window, found.tolist(), strict=True) if gain >= cut]
        for player, gain in passing:
            ends = before is not None and previous / gain - before / previous > jump
            if ends and gain < close * previous:
                return queue
            chosen.append(player)
            queue = [each for each in queue if each != player]
            if ends:
                return queue
            before, previous = previous, gain
        if not passing:
            break
    return queue
