import pytest
import torch
from torch.nn import functional as F

from explainers.evaluation import Evaluation
from explainers.evaluation.sweep import Sweep, bilinear
from explainers.masking import PatchGrid
from explainers.metrics.curves import QUANTITIES
from explainers.metrics.perturbation import importance_order
from explainers.models.removal import masked_scores


def swept(sweep, target, images, heatmaps, classes):
    normalised, logits = target.normalise(images), target(images)
    ends = torch.stack([logits, sweep.empty(normalised).expand_as(logits)], 1)
    index = torch.arange(len(images))
    return sweep(normalised, heatmaps, index, classes, classes, ends)


@torch.no_grad()
def test_pixels_leave_in_the_order_of_the_heatmap_scaled_up(target, grid, images):
    """Against a loop over levels that removes pixels one by one."""
    heatmaps, classes = torch.rand(2, 4, 4), torch.tensor([1, 3])
    heatmaps[:, ::3, ::3] += 5  # the pixels in each corner are equal: no level may divide them
    images = images[:2]
    found = swept(Sweep(target, Evaluation(grid, levels=4, order="pixels"), "black"), target, images, heatmaps, classes)
    for row in range(2):
        large = F.interpolate(heatmaps[row][None, None], (32, 32), mode="bilinear", align_corners=False).flatten()
        order = large.argsort(descending=True)
        for level in range(4):
            important = order[: level * 1024 // 3]
            hidden = torch.zeros(1024, dtype=torch.bool)
            hidden[important] = True
            for side, mask in enumerate((hidden, ~hidden)):
                pixels = images[row].clone()
                pixels[:, mask.view(32, 32)] = 0
                expected = target(pixels[None]).softmax(-1)[0, classes[row]]
                got = found[row, QUANTITIES.index("probability"), side, level]
                assert got.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(("side", "size"), [(8, 64), (6, 42), (4, 32)])
def test_pixels_between_equal_patches_leave_in_random_order(make_target, monkeypatch, side, size):
    """On the first three grids, bilinear interpolation by rounded weights gives 2 to 4 values to equal scores."""
    orders = []

    def recorded(predict, order, *_):
        orders.append(order)

    monkeypatch.setattr("explainers.evaluation.sweep.perturbation_sweep", recorded)
    target, grid, index = make_target(), PatchGrid(size, size // side), torch.arange(4)
    half = torch.full((side, side), 0.3)
    half[:, side // 2 :] = 0.1
    heatmaps = torch.stack([torch.full((side, side), 0.1), torch.full((side, side), -1 / 3), half, half.mT])
    images = torch.zeros(4, 3, size, size)
    Sweep(target, Evaluation(grid, order="pixels"))(images, heatmaps, index, index, index, images)
    random = importance_order(torch.zeros(4, size * size), index)
    assert torch.equal(orders[0][:2], random[:2])
    between = size // side // 2 * 2  # pixels between the middles of two patches
    assert [len(bilinear(each[None], (size, size)).unique()) for each in (half, half.mT)] == [between + 2] * 2
    large = F.interpolate(heatmaps[:, None], (size, size), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(bilinear(heatmaps, (size, size)), large)


@torch.no_grad()
@pytest.mark.parametrize("removal", ["zero", "black", "drop"])
def test_an_empty_image_is_the_same_for_all(target, grid, images, removal):
    sweep, normalised = Sweep(target, Evaluation(grid), removal), target.normalise(images)
    hidden = torch.zeros(len(images), 1, 16, dtype=torch.bool)
    classes = torch.arange(len(images))
    expected = masked_scores(target, normalised, classes, hidden, grid, removal)[:, 0]
    torch.testing.assert_close(sweep.empty(normalised).softmax(-1)[0, classes], expected)
