"""Other people's estimators and searches on the curve of passes: what they compute, and how many passes they count."""

from itertools import permutations

import numpy as np
import pytest
import torch

from benchmarks.curve_anchors import ASKED, estimate, explain_once, play, search, square_regions
from benchmarks.curve_heatmaps import Batch
from benchmarks.curve_searches import Game, search_both_ends, search_by_phases
from explainers.masking import PatchGrid
from explainers.posthoc import Occlusion

CLASSES = torch.tensor([3, 0, 4, 1, 1])
COUNT = 13


def random_game(seed, close):
    """Probabilities of sets, by random weights of players and pairs: a game, and a function of Python sets.

    `close` weights fill PhaseWin's windows; others, with strong pairs, leave players that lower the probability.
    """
    generator = np.random.default_rng(seed)
    mean, spread, of_pairs = (0.3, 0.03, 0.01) if close else (0.0, 1.0, 2.0)
    weights = mean + spread * generator.normal(size=COUNT)
    pairs = of_pairs * generator.normal(size=(COUNT, COUNT))

    def probability(members):
        row = np.array([each in members for each in range(COUNT)], dtype=float)
        return float(1 / (1 + np.exp(3 - row @ weights - row @ pairs @ row)))

    return Game(lambda sets: np.array([probability(set(np.flatnonzero(row))) for row in sets])), probability


class Slow:
    """p(S) and p(all but S) of one set at a time; `asked` are all masks."""

    def __init__(self, probability):
        self.probability, self.asked, self.all = probability, set(), set(range(COUNT))

    def __call__(self, members):
        members = frozenset(members)
        self.asked |= {members, frozenset(self.all - members)}
        return self.probability(members), self.probability(self.all - members)


def slow_both_ends(pair, pending):
    """LiMA's bidirectional search, as the paper's algorithm is read: one candidate at a time."""

    def worth(members):
        inside, outside = pair(members)
        return 20 * inside + 5 * (1 - outside)

    front, back = [], []
    while len(front) + len(back) < COUNT:
        candidates = [each for each in range(COUNT) if each not in front + back]
        values = {each: worth([*front, each]) for each in candidates}
        best = max(values, key=values.get)
        if len(candidates) > pending:
            weakest = [each for each in sorted(candidates, key=values.get)[:pending] if each != best]
            if weakest:
                back.insert(0, min(weakest, key=lambda each: worth([*back, each])))
        front.append(best)
    return front + back


def slow_by_phases(pair, width):
    """PhaseWin's search, one gain at a time, with a state for all players."""
    order, state = [], dict.fromkeys(range(COUNT), "left")

    def gain(player):
        (inside, outside), (before, rest) = pair([*order, player]), pair(order)
        return (inside - outside) - (before - rest)

    def gains(which):
        return {player: gain(player) for player in which}

    def take(player):
        state[player] = "chosen"
        order.append(player)

    waiting = list(range(COUNT))  # in the order of the search
    while waiting:
        all_gains = gains(waiting)
        top = max(all_gains, key=all_gains.get)
        if all_gains[top] <= 0:
            break
        take(top)
        history = [all_gains[top]]
        waiting.remove(top)
        all_gains = gains(waiting)
        if not waiting or max(all_gains.values()) <= 0:
            continue
        largest = max(all_gains.values())
        for player in waiting:
            state[player] = "pruned" if all_gains[player] < 0.05 * largest else "left"
        queue = sorted([p for p in waiting if all_gains[p] >= 0.6 * largest], key=all_gains.get, reverse=True)
        between = [p for p in waiting if 0.05 * largest <= all_gains[p] < 0.6 * largest]
        open_phase = True
        while open_phase and queue:
            now = gains(queue[:width])
            accepted = [p for p in now if now[p] >= 0.6 * largest and now[p] >= 0.99 * max(now.values())]
            open_phase = bool(accepted)
            for player in accepted:
                falls = len(history) > 1 and history[-1] / now[player] - history[-2] / history[-1] > 0.02
                if falls:
                    open_phase = False
                if not falls or now[player] >= 0.98 * history[-1]:
                    take(player)
                    history.append(now[player])
                    queue.remove(player)
                if falls:
                    break
        waiting = queue + between
    for group in (waiting, [p for p in range(COUNT) if state[p] == "pruned"]):
        for player in sorted(group, key=gains(group).get, reverse=True):
            order.append(player)
    return order


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_searches_find_the_order_and_the_passes_of_slow_ones(seed, close):
    for fast, slow in (
        (lambda game: search_both_ends(game, COUNT, pending=4), lambda pair: slow_both_ends(pair, 4)),
        (lambda game: search_by_phases(game, COUNT, window=0.3), lambda pair: slow_by_phases(pair, 3)),
    ):
        game, probability = random_game(seed, close)
        pair = Slow(probability)
        assert fast(game) == slow(pair)
        assert game.passes == len(pair.asked)


def test_searches_sort_players_that_add_up():
    weights = np.random.default_rng(0).permutation(np.linspace(0.2, 1.0, COUNT))
    for order in (search_both_ends, search_by_phases):
        game = Game(lambda sets: sets @ weights / weights.sum())
        assert order(game, COUNT) == (-weights).argsort().tolist()
        assert game.passes <= 2 * COUNT * (COUNT + 1) // 2


def test_a_game_computes_every_set_once():
    computed = []
    game = Game(lambda sets: computed.append(len(sets)) or sets.sum(1).astype(float))
    sets = np.array([[1, 0, 1], [0, 0, 1], [1, 0, 1]], dtype=bool)
    assert game(sets).tolist() == [2, 1, 2] and game(sets[1]).tolist() == [1]
    assert computed == [2] and game.passes == 2


def hide_by_hand(target, image, label, squares):
    """The probability when all 16 × 16 pixels of a square outside `squares` are 0 after normalisation."""
    pixels = target.normalise(image[None])
    for square in set(range(4)) - set(squares):
        row, column = 16 * (square // 2), 16 * (square % 2)
        pixels[..., row : row + 16, column : column + 16] = 0
    return target.classify(target.embed(pixels)).softmax(-1)[0, label].item()


def test_regions_are_squares_of_pixels_that_are_hidden_together(target, grid, images):
    batch = Batch(target, grid, images, CLASSES, [16])
    game = play(batch, 2, square_regions(batch))
    sets = np.array([[1, 0, 0, 1], [0, 0, 1, 0]], dtype=bool)
    with torch.no_grad():
        expected = [hide_by_hand(target, images[2], CLASSES[2], np.flatnonzero(row)) for row in sets]
    np.testing.assert_allclose(game(sets), expected, rtol=1e-5)


def test_heatmaps_of_a_search_are_ranks_of_the_squares(target, grid, images):
    heatmaps, spent = search(lambda game, count: [2, 0, 3, 1], Batch(target, grid, images, CLASSES, [16]))
    expected = torch.tensor([[3.0, 1.0], [4.0, 2.0]]).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert (heatmaps[ASKED] == expected).all() and spent == {ASKED: [0] * 5}


@pytest.mark.parametrize("removal", ["zero", "drop"])
def test_shapiq_on_our_games_finds_shapley_values(removal, target, images):
    pytest.importorskip("shapiq", reason="shapiq is one of the peers")
    batch = Batch(target, PatchGrid(image_size=32, patch_size=16), images, CLASSES, [16], removal)
    kernel, spent = estimate("shapiq-KernelSHAP", batch)
    chains, spent_by_chains = estimate("shapiq-Permutations", batch)
    game = play(batch, 1, torch.arange(4))
    expected = torch.zeros(4)
    for order in permutations(range(4)):
        for place, player in enumerate(order):
            row = np.isin(range(4), order[:place])
            expected[player] += (game(row | (np.arange(4) == player)) - game(row))[0] / 24
    torch.testing.assert_close(kernel[16][1].flatten(), expected, rtol=1e-3, atol=1e-5)
    assert spent == {16: [16] * 5} and all(5 <= count <= 16 for count in spent_by_chains[16])
    torch.testing.assert_close(chains[16][1].sum(), expected.sum(), rtol=1e-3, atol=1e-5)


def test_a_method_as_it_is_has_its_heatmaps_and_counted_passes(target, grid, images):
    method = Occlusion(target, grid)
    heatmaps, spent = explain_once(method, Batch(target, grid, images, CLASSES, [16]))
    torch.testing.assert_close(heatmaps[ASKED], method(images, CLASSES))
    assert spent[ASKED] == [method.forward_passes] * 5
