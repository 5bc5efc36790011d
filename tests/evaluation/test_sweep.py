import pytest
import torch
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.evaluation.sweep import Sweep
from explainers.metrics.curves import QUANTITIES
from explainers.removal import masked_probabilities


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
    found = swept(Sweep(target, grid, "black", levels=4, order="pixels"), target, images, heatmaps, classes)
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


@torch.no_grad()
@pytest.mark.parametrize("removal", ["zero", "black", "drop"])
def test_an_empty_image_is_the_same_for_all(target, grid, images, removal):
    sweep, normalised = Sweep(target, grid, removal), target.normalise(images)
    hidden = torch.zeros(len(images), 1, 16, dtype=torch.bool)
    expected = masked_probabilities(target, normalised, hidden, grid, removal)[:, 0]
    torch.testing.assert_close(sweep.empty(normalised).softmax(-1).expand_as(expected), expected)


def test_pixels_cannot_be_dropped(target, grid):
    with pytest.raises(InputError, match="expected order=patches with removal drop, got pixels"):
        Sweep(target, grid, "drop", order="pixels")
    with pytest.raises(InputError, match="expected order patches or pixels, got pixel"):
        Sweep(target, grid, order="pixel")
