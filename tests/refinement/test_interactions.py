"""Interactions of pairs of cells: against definitions with loops, planted ones, and their standard errors."""

import itertools

import numpy as np
import pytest
import torch

from explainers.errors import InputError
from explainers.refinement import fit, interactions, refine
from explainers.refinement.coalitions import draw_coalitions
from explainers.refinement.interactions import fit_interactions, strongest


def every_pair(patches):
    """One coalition of each pair of complementary coalitions."""
    return [mask for mask in itertools.product([False, True], repeat=patches) if mask[0]]


def banzhaf_interaction(game, patches, z, w):
    """The mean of v(S ∪ zw) − v(S ∪ z) − v(S ∪ w) + v(S) over all S without z and w."""
    rest = [patch for patch in range(patches) if patch not in (z, w)]
    parts = []
    for size in range(len(rest) + 1):
        for chosen in itertools.combinations(rest, size):
            s = frozenset(chosen)
            parts.append(game[s | {z, w}] - game[s | {z}] - game[s | {w}] + game[s])
    return sum(parts) / len(parts)


def sums_of(game, masks):
    sets = [frozenset(np.flatnonzero(mask).tolist()) for mask in masks]
    return torch.tensor([[game[s] + game[frozenset(range(len(masks[0]))) - s] for s in sets]])


@pytest.mark.parametrize("smooth", [0.01, 0.5])
def test_all_coalitions_of_nine_patches_give_banzhaf_interactions(monkeypatch, smooth):
    monkeypatch.setattr(fit, "STRENGTHS", torch.tensor([1e-9], dtype=torch.double))
    monkeypatch.setattr(interactions, "SMOOTH", smooth)
    monkeypatch.setattr(interactions, "TINY", 1e-13)
    draws = np.random.default_rng(0)
    game = {frozenset(each): draws.normal() for size in range(10) for each in itertools.combinations(range(9), size)}
    masks = every_pair(9)
    found = fit_interactions(torch.tensor([masks]), sums_of(game, masks), (3, 3), 1).values[0]
    for z, w in itertools.combinations(range(9), 2):
        assert found[z, w].item() == pytest.approx(banzhaf_interaction(game, 9, z, w), abs=1e-4)


def test_few_pairs_agree_with_the_normal_distribution_of_all_interactions(monkeypatch):
    """Value and error of two cells, from the covariances of all φ_zw and observations, for one strength."""
    relative, side, shape = 0.1, 2, (3, 4)
    monkeypatch.setattr(fit, "STRENGTHS", torch.tensor([relative], dtype=torch.double))
    draws = np.random.default_rng(1)
    keep, y = draws.random((10, 12)) < 0.5, draws.normal(size=10)
    found = fit_interactions(torch.tensor(keep[None]), torch.tensor(2 * y[None]), shape, side)
    value, error = normal_interaction(keep, y, shape, (0, 3), side, relative * 12**2 / 2)
    assert found.values[0, 0, 3].item() == pytest.approx(value)
    assert found.errors(torch.tensor([[[0, 3]]])).item() == pytest.approx(error)


def normal_interaction(keep, y, shape, cells, side, strength):
    """4 Σ φ_zw of two cells, and its error, where φ_zw = a_zw + a_wz, and a_zw has the covariance Q Q / 2."""
    patches = [(row, column) for row in range(shape[0]) for column in range(shape[1])]
    distance = [[(r - s) ** 2 + (c - d) ** 2 for s, d in patches] for r, c in patches]
    q = np.exp(-np.array(distance) / 2 / interactions.SMOOTH**2)
    cell = [row // side * -(-shape[1] // side) + column // side for row, column in patches]
    signs = np.where(keep, 1, -1)
    observed = np.array([np.outer(s, s).ravel() for s in signs])  # of a, as N² numbers
    wanted = np.zeros((len(patches), len(patches)))
    for z, w in itertools.product(range(len(patches)), repeat=2):
        wanted[z, w] = sorted([cell[z], cell[w]]) == sorted(cells)
    covariance = np.kron(q, q) / 2
    centre = np.eye(len(y)) - 1 / len(y)
    observed = centre @ observed
    gram = observed @ covariance @ observed.T
    inverse = np.linalg.inv(gram + strength * np.eye(len(y)))
    influence = inverse @ observed @ covariance @ wanted.ravel()
    value = influence @ centre @ y
    residual = strength * inverse @ centre @ y
    variance = (centre @ y) @ inverse @ (centre @ y) * strength / (len(y) - 3) / strength
    left = wanted.ravel() - observed.T @ influence
    hat = np.diag(gram @ inverse) + 1 / len(y)
    noise = (influence**2 * residual**2 / (1 - hat)).sum() * (len(y) - 1) / (len(y) - 3)
    return 4 * value, 4 * np.sqrt(variance * (left @ covariance @ left) + noise)


def planted(passes, noise):
    """Two of 14 × 14 patches count only together, beside effects of single patches and noise."""
    keep = draw_coalitions("regions", 0, passes // 2, torch.zeros(1, 196), (14, 14), 0.0, 0)
    draws = torch.Generator().manual_seed(0)
    single = torch.randn(196, generator=draws, dtype=torch.double) * 0.1

    def value(keep):
        both = keep[..., 45] & keep[..., 150]
        return both.double() + keep.double() @ single + noise * torch.randn(keep.shape[:-1], generator=draws)

    return keep, value(keep) + value(~keep)


def test_a_planted_pair_of_patches_is_found():
    keep, sums = planted(512, 0.1)
    found = strongest(fit_interactions(keep, sums, (14, 14), 2), (14, 14), 2, 3)
    assert found.shape == (7, 7)
    assert found.pairs[0, 0].tolist() == [1 * 7 + 1, 5 * 7 + 5]  # rows and columns 3 and 10 of patches
    assert found.values[0, 0] > found.errors[0, 0]


def test_noise_has_no_interactions():
    keep, _ = planted(256, 0.0)
    sums = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    found = strongest(fit_interactions(keep, sums, (14, 14), 2), (14, 14), 2, 50)
    assert (found.values.abs() < 2 * found.errors).all()


def test_refined_images_have_interactions_that_passes_in_parts_do_not_change(target, images):
    at_once = refine(None, images, None, 64, target=target).interactions(top=5)
    refined = refine(None, images, None, 16, target=target).more(48)
    assert at_once.shape == (2, 2)
    torch.testing.assert_close(refined.interactions(top=5)[1:3], at_once[1:3], rtol=1e-3, atol=1e-5)
    single = refined.interactions(top=1000, side=1)
    assert single.pairs.shape == (5, 120, 2)
    assert (single.values.abs().diff(dim=1) <= 0).all()
    with pytest.raises(InputError, match="top"):
        refined.interactions(top=0)
