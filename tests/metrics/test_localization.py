import pytest
import torch

from explainers.metrics.localization import PointingGame, hits


def peak_at(row, column, side):
    heatmap = torch.rand(side, side)
    heatmap[row, column] = 2
    return heatmap


@pytest.mark.parametrize(("side", "pixels"), [(4, 32), (7, 21), (3, 16)])
def test_a_peak_hits_an_object_in_its_own_patch_and_no_other(side, pixels):
    for row, column in ((0, side - 1), (side - 1, 0), (1, 2), (2, 1)):
        heatmap = peak_at(row, column, side)
        for object_row in range(side):
            for object_column in range(side):
                truth = torch.zeros(pixels, pixels, dtype=torch.bool)
                rows = slice(object_row * pixels // side, (object_row + 1) * pixels // side)
                columns = slice(object_column * pixels // side, (object_column + 1) * pixels // side)
                truth[rows, columns] = True
                hit = hits(heatmap[None], truth[None]).item()
                assert hit == ((row, column) == (object_row, object_column))


def test_the_object_must_hold_the_centre_of_the_patch():
    truth = torch.zeros(2, 16, 16, dtype=torch.bool)
    truth[0, 6, 10] = True  # the centre of row 1, column 2 of patches of 4 pixels
    truth[1, 4:8, 8:12] = True
    truth[1, 6, 10] = False
    heatmaps = torch.stack([peak_at(1, 2, 4)] * 2)
    assert hits(heatmaps, truth).tolist() == [True, False]


def test_images_without_an_object_do_not_count():
    heatmaps = torch.stack([peak_at(1, 3, 4), peak_at(3, 1, 4), peak_at(0, 0, 4), peak_at(2, 2, 4)])
    truth = torch.zeros(4, 32, 32, dtype=torch.bool)
    truth[0, 8:16, 24:32] = True  # hit
    truth[1, 8:16, 24:32] = True  # missed: the mirror image of the peak
    truth[3, 0:8] = True  # missed
    metric = PointingGame()
    metric.update(heatmaps[:3], truth[:3])
    metric.update(heatmaps[3:], truth[3:])
    assert metric.compute() == pytest.approx(1 / 3)
    assert metric.images == 3


def test_without_any_object_there_is_nothing_to_hit():
    metric = PointingGame()
    metric.update(torch.rand(2, 4, 4), torch.zeros(2, 8, 8, dtype=torch.bool))
    assert metric.compute().isnan()


def test_two_processes_play_the_game_of_one():
    heatmaps, truth = torch.rand(7, 4, 4), torch.rand(7, 16, 16) < 0.5
    one, first, second = PointingGame(), PointingGame(), PointingGame()
    one.update(heatmaps, truth)
    first.update(heatmaps[:2], truth[:2])
    second.update(heatmaps[2:], truth[2:])
    first.merge_state(second)
    assert first.compute() == one.compute()
    assert 0 < one.compute() < 1
