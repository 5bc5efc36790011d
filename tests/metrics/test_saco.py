import pytest
import references_faithfulness
import torch

from explainers.metrics.saco import group_saliences, saco, salience_groups


def measured(scores, worth, groups):
    """F of heatmaps (B, N), if every patch is worth its own number (B, N) to the prediction."""
    keep = salience_groups(scores, torch.arange(len(scores)), groups)
    drops = ((~keep).double() * worth[:, None]).sum(-1)
    return saco(drops, group_saliences(scores, keep))


@pytest.mark.parametrize(("num_patches", "groups"), [(16, 4), (49, 10), (5, 5)])
def test_groups_and_coefficient_are_those_of_loops(num_patches, groups):
    scores, drops = torch.randn(4, num_patches), torch.randn(4, groups)
    keep = salience_groups(scores, torch.arange(4), groups)
    saliences = group_saliences(scores, keep)
    found = saco(drops, saliences)
    assert keep.dtype == torch.bool and keep.shape == (4, groups, num_patches)
    for image in range(4):
        expected = references_faithfulness.salience_groups(scores[image].tolist(), groups)
        assert [set((~mask).nonzero()[:, 0].tolist()) for mask in keep[image]] == expected
        sums = [sum(scores[image, patch].item() for patch in group) for group in expected]
        lowest = scores[image].min().item() * (num_patches // groups)
        assert saliences[image].tolist() == pytest.approx([total - lowest for total in sums])
        value = references_faithfulness.saco(drops[image].tolist(), sums)
        assert found[image].item() == pytest.approx(value, abs=1e-9)


def test_worth_in_the_order_of_salience_has_1_and_in_the_opposite_order_minus_1():
    worth = torch.rand(3, 49).double()
    torch.testing.assert_close(measured(worth, worth, 10), torch.ones(3).double())
    torch.testing.assert_close(measured(-worth, worth, 10), -torch.ones(3).double())


def test_offset_and_unit_of_the_heatmap_do_not_count():
    scores, worth = torch.randn(4, 49).double(), torch.rand(4, 49)
    torch.testing.assert_close(measured(3 * scores - 50, worth, 10), measured(scores, worth, 10))


def test_random_heatmaps_have_0_on_average_with_leftover_patches_too():
    num_patches = 16  # no multiple of the number of groups
    values = measured(torch.rand(3000, num_patches), torch.randn(3000, num_patches).exp(), 10)
    assert values.mean().abs() < 4 * values.std() / 3000**0.5


@pytest.mark.parametrize("value", [-0.7, 0.0])
def test_a_heatmap_of_equal_scores_has_0_and_groups_that_depend_on_the_image_alone(value):
    scores = torch.full((3, 49), value)
    assert measured(scores, torch.rand(3, 49), 10).tolist() == pytest.approx([0, 0, 0], abs=1e-9)
    keep = salience_groups(scores, torch.tensor([4, 8, 4]), 10)
    assert torch.equal(keep[0], keep[2]) and not torch.equal(keep[0], keep[1])
    assert torch.equal(salience_groups(scores[1:2], torch.tensor([8]), 10), keep[1:2])
