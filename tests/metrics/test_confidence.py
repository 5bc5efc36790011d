"""ROAD, average drop and increase, and ARCC, against loops over pixels, patches and masks."""

import statistics

import numpy as np
import pytest
import references
import references_masks
import torch

from explainers.evaluation import Evaluation
from explainers.evaluation.measurement import Measurement, list_columns
from explainers.metrics.confidence import arcc, average_drop, fade, road, road_masks, unit_masks
from explainers.models.imputation import impute
from explainers.posthoc import GAE

PROBES = ["road", "average_drop", "average_increase", "arcc"]


def solve(image, visible):
    """Solve the equations of all hidden pixels of an image (C, H, W) as one dense system."""
    image, visible = image.double().numpy(), visible.tolist()
    channels, height, width = image.shape
    places = [(i, j) for i in range(height) for j in range(width) if not visible[i][j]]
    number = {place: n for n, place in enumerate(places)}
    left, right = np.zeros((len(places), len(places))), np.zeros((len(places), channels))
    for (i, j), n in number.items():
        for k, m in [(i + a, j + b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)]:
            if not (0 <= k < height and 0 <= m < width):
                continue
            weight = 1 / 6 if k == i or m == j else 1 / 12
            left[n, n] += weight
            if visible[k][m]:
                right[n] += weight * image[:, k, m]
            else:
                left[n, number[k, m]] -= weight
    filled = image.copy()
    for (i, j), value in zip(places, np.linalg.solve(left, right), strict=True):
        filled[:, i, j] = value
    return torch.from_numpy(filled)


def test_hidden_pixels_are_the_weighted_means_of_those_around():
    images = torch.randn(3, 2, 12, 20)
    visible = torch.rand(3, 1, 12, 20) < torch.tensor([0.9, 0.5, 0.1])[:, None, None, None]
    visible[2] = (
        torch.zeros(3, 5).index_fill(1, torch.tensor([0, 3]), 1).repeat_interleave(4, 0).repeat_interleave(4, 1)
    )
    found = impute(images, visible, noise=0)
    for image in range(3):
        expected = solve(images[image], visible[image, 0])
        torch.testing.assert_close(found[image].double(), expected, atol=1e-3, rtol=0)
        alone = impute(images[image : image + 1], visible[image : image + 1], noise=0)
        torch.testing.assert_close(alone[0], found[image], atol=1e-6, rtol=0)
        assert torch.equal(
            found[image][visible[image].expand(2, -1, -1)], images[image][visible[image].expand(2, -1, -1)]
        )
    assert not impute(images, torch.zeros_like(visible), noise=0).any()


def test_large_holes_are_filled_as_exactly():
    """A plane has the equations' solution 0 everywhere, also in a hole of two thirds of the image."""
    plane = (torch.arange(96.0)[:, None] - 2 * torch.arange(96.0)).div(60)[None, None]
    visible = torch.ones(1, 1, 96, 96, dtype=torch.bool)
    visible[..., 10:90, 12:92] = False
    torch.testing.assert_close(impute(plane, visible, noise=0), plane, atol=2e-3, rtol=0)


def test_noise_is_added_to_hidden_pixels_alone_and_is_that_of_every_image():
    images, visible = torch.zeros(2, 3, 64, 64), torch.rand(2, 1, 64, 64) < 0.5
    found = impute(images, visible)
    hidden = ~visible.expand_as(found)
    assert found[hidden].std().item() == pytest.approx(0.01, rel=0.05) and not found[~hidden].any()
    both = hidden[0] & hidden[1]
    torch.testing.assert_close(found[0][both], found[1][both])


@torch.no_grad()
def slow(target, explain, image):
    """All numbers of one uint8 image."""

    def predict(normalised):
        return target.classify(target.embed(normalised.float()[None]))[0].softmax(0)

    def mask(heatmap):
        return references_masks.unit(references_masks.bilinear(heatmap, (32, 32)))

    normalised = target.normalise(image[None])[0]
    label = predict(normalised).argmax()
    whole = predict(normalised)[label].item()
    heatmap = explain(image[None], label[None])[0]
    order = sorted(range(16), key=lambda patch: -heatmap.flatten()[patch].item())
    noise = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)).double() * 0.01
    sides = {"morf": [], "lerf": []}
    for percent in range(10, 100, 10):
        for side, most_important_first in zip(sides, (True, False), strict=True):
            count = 16 * percent // 100
            gone = order[:count] if most_important_first else order[16 - count :]
            visible = torch.ones(32, 32, dtype=torch.bool)
            for patch in gone:
                visible[references.window(patch, 4, 8)] = False
            filled = solve(normalised, visible) + noise * ~visible
            sides[side].append(predict(filled)[label].item())
    numbers = {"road": (statistics.mean(sides["lerf"]) - statistics.mean(sides["morf"])) / 2}
    own = mask(heatmap)
    faded = predict(normalised * own)[label].item()
    numbers["average_drop"] = max(0, whole - faded) / whole
    numbers["average_increase"] = float(faded > whole)
    mean = 255 * target.mean
    again = mask(explain((mean + own * (image - mean)).round().byte()[None], label[None])[0])
    correlation = np.corrcoef(own.flatten(), again.flatten())[0, 1]
    four = statistics.mean(sides["lerf"][i] - sides["morf"][i] for i in (1, 3, 5, 7))
    parts = [(correlation + 1) / 2, 1 - own.mean().item(), min(max(four, 0), 1)]
    return numbers | {"arcc": statistics.harmonic_mean(parts)}


@pytest.mark.slow
def test_an_evaluation_has_the_numbers_of_loops(target, grid, images):
    explain = GAE(target, grid)
    settings = Evaluation(grid, curves=[], probes=PROBES, localization=[], chunk_size=7)
    measurement = Measurement(target, {"gae": explain}, settings)
    for part in images[:2].split(1):
        measurement.update({"image": part})
    results, scores = measurement.summarise()
    expected = [slow(target, explain, image) for image in images[:2]]
    for number in expected[0]:
        found = scores.rows["gae"][number].tolist()
        assert found == pytest.approx([row[number] for row in expected], abs=2e-3), number
        assert results["gae"][number] == pytest.approx(statistics.mean(found), abs=1e-6)
    assert results["gae"].keys() >= {"road_error", "arcc_error"}
    assert list_columns(settings).keys() >= set(PROBES)


def test_masks_of_road_hide_a_tenth_more_each_time():
    scores = torch.tensor([[0.3, 0.9, 0.1, 0.5, 0.2, 0.0, 0.8, 0.6, 0.4, 0.7]])
    keep = road_masks(scores, torch.tensor([0]))[0]
    assert keep.sum(1).tolist() == [*range(9, 0, -1)] * 2
    assert [mask.nonzero()[0].item() for mask in ~keep[[0, 9]]] == [1, 5]


@pytest.mark.parametrize("patches", [16, 49])
def test_heatmaps_that_know_nothing_score_0_however_many_patches_there_are(patches):
    """Of an output that falls by the same for each hidden patch, exactly; of one of other weights, on average."""
    index, weights = torch.arange(400), torch.rand(400, 1, patches)
    for scores in (torch.zeros(400, patches), torch.rand(400, patches)):
        keep = road_masks(scores, index).float()
        assert road(keep.mean(-1)).abs().max() < 1e-9
        of_images = road((keep * weights).sum(-1) / patches)
        assert abs(of_images.mean()) < 4 * of_images.std() / 20


def test_a_perfect_mask_and_heatmaps_without_differences_have_known_numbers(grid):
    assert not unit_masks(torch.full((2, 4, 4), 3.0), grid.size).any()
    assert average_drop(torch.tensor([0.8, 0.5]), torch.tensor([0.2, 0.6])).tolist() == pytest.approx([0.75, 0])
    half = torch.cat([torch.ones(1, 4, 2), torch.zeros(1, 4, 2)], 2)
    perfect = torch.cat([torch.zeros(1, 9), torch.ones(1, 9)], 1)
    assert arcc(half, half, perfect).item() == pytest.approx(3 / (1 + 2 + 1))
    assert arcc(half, torch.zeros(1, 4, 4), perfect).item() == pytest.approx(3 / (2 + 2 + 1))
    assert arcc(half, half, perfect.flip(1)).item() == 0 == pytest.approx(arcc(half, 1 - half, perfect).item())


@pytest.mark.parametrize(("dtype", "white"), [(torch.uint8, 255), (torch.uint16, 65535)])
def test_a_faded_image_has_the_mean_pixel_where_the_mask_is_0(dtype, white):
    image = torch.tensor([[[[0, white, white, 0]]]]).to(dtype)
    faded = fade(image, torch.tensor([[[0.0, 0.0, 1.0, 0.75]]]), torch.tensor([[[0.2]]]))
    expected = [round(0.2 * white), round(0.2 * white), white, round(0.05 * white)]
    assert faded.dtype == dtype and faded.flatten().tolist() == expected
