"""Coalitions around a ranking of the patches."""

import pytest
import torch

from explainers.refinement.coalitions import draw_coalitions, rank_coalitions

NUMBERS = torch.arange(200)


def test_without_noise_they_are_the_highest_scores_of_every_size_alike():
    scores = torch.randn(3, 16)
    keep = rank_coalitions(NUMBERS, scores, (4, 4), 0.0, seed=0)
    for image in range(3):
        order = scores[image].argsort(descending=True).tolist()
        for mask in keep[image]:
            assert set(mask.nonzero()[:, 0].tolist()) == set(order[: int(mask.sum())])
    counts = keep[0].sum(1).bincount(minlength=17)
    assert counts[0] == counts[16] == 0 and counts[1:16].min() >= 12 and counts[1:16].max() <= 15


@pytest.mark.parametrize("fit", ["ranking", "regions", "shapley"])
def test_draws_in_parts_are_those_at_once(fit):
    scores = torch.randn(2, 16)
    at_once = draw_coalitions(fit, 0, 9, scores, (4, 4), seed=1)
    parts = [draw_coalitions(fit, first, last, scores, (4, 4), seed=1) for first, last in ((0, 4), (4, 9))]
    assert at_once.shape == (2, 9, 16) and torch.equal(torch.cat(parts, 1), at_once)
    assert torch.equal(at_once[0], at_once[1]) == (fit != "ranking")
    assert not torch.equal(draw_coalitions(fit, 0, 9, scores, (4, 4), seed=2), at_once)
