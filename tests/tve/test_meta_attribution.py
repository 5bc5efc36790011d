"""Definitions 1 and 2, and their meta-attributions as a source of what a loss needs."""

import pytest
import references
import torch
from toys import batch_of

from explainers.tve.oracle import Oracle
from explainers.tve.tve import TVELoss


@torch.no_grad()
@pytest.mark.parametrize("hops", [0, 2])
def test_the_attribution_of_a_patch_is_the_papers(target, grid, images, hops):
    """Equation 4: log f(N(z); x, y) − log f(Z \\ N(z); x, y), for N(z) cut out with slices."""
    labels = torch.tensor([3, 0, 4, 1, 1])
    heatmaps = Oracle(target, grid, hops, chunk_size=7)(images, labels)
    assert heatmaps.shape == (5, 4, 4)
    for i in range(5):
        expected = references.attribution(target.score_images, target.normalise(images)[i], labels[i], 4, hops)
        assert expected.std() > 0.1
        torch.testing.assert_close(heatmaps[i], expected, rtol=1e-4, atol=1e-5)


def test_rows_are_the_papers_of_the_patches_that_were_drawn(target, grid, images):
    source = TVELoss(target, grid, hops=(1,), patches_per_image=3, chunk_size=4)
    rows = source(batch_of(images))
    assert rows.keys() == {"patch", "meta"} and rows.keys() == set(source.provides)
    assert not rows["meta"].requires_grad
    for i, normalised in enumerate(target.normalise(images)):
        assert len(set(rows["patch"][i].tolist())) == 3
        expected = references.meta_attribution(target.embed, normalised, side=4, hops=1)[rows["patch"][i]]
        torch.testing.assert_close(rows["meta"][i], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_of_several_neighbourhood_sizes_each_serves_its_share_of_the_patches(target, grid, images):
    source = TVELoss(target, grid, hops=(0, 1, 2), patches_per_image=16)
    normalised = target.normalise(images)
    wanted = torch.stack(
        [
            torch.stack([references.meta_attribution(target.embed, image, 4, hops) for image in normalised])
            for hops in (0, 1, 2)
        ]
    )  # (3, B, N, 2, D)
    counts = torch.zeros(3)
    for epoch in range(5):
        seen = source(batch_of(images), epoch)
        assert torch.equal(seen["patch"].sort(1).values, torch.arange(16).expand(5, 16))
        of_patch = wanted[:, torch.arange(5)[:, None], seen["patch"]]  # (3, B, Z, 2, D)
        error, hop = (of_patch - seen["meta"]).abs().amax((-1, -2)).min(0)
        assert error.max() < 1e-4
        counts += hop.flatten().bincount(minlength=3)
    assert counts.sum() == 400
    assert (counts - 400 / 3).abs().max() < 48  # five standard deviations
