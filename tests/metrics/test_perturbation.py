import numpy as np
import pytest
import references
import torch

from explainers.masking import PatchGrid, masked_forward
from explainers.metrics.perturbation import Fidelity, perturbation_sweep

GRID = PatchGrid(image_size=16, patch_size=4)  # 16 patches
BLACK = torch.tensor([-2.0, -1.5, -1.0])[:, None, None]
LABELS = torch.tensor([0, 3, 1, 4, 2])


@pytest.fixture
def predict():
    weight = torch.randn(3 * 16 * 16, 5)
    return lambda images: (images.flatten(1) @ weight / 20).softmax(-1)


@pytest.fixture
def pictures():
    return torch.randn(5, 3, 16, 16)


@pytest.fixture
def scores():
    return torch.randn(5, 16)


def linear(images):
    """A model to which every patch contributes whatever else is visible."""
    weight = torch.randn(3 * 16 * 16, 5, generator=torch.Generator().manual_seed(9))
    return images.flatten(1) @ weight + 0.3


def sweep(predict, images, scores, labels, levels, fill=0.0, chunk_size=256):
    """`perturbation_sweep` of a function of normalised images."""
    return perturbation_sweep(
        lambda keep: masked_forward(predict, images, keep, GRID, fill, chunk_size), scores, labels, levels
    )


def measure(predict, pictures, scores, levels, fill=0.0, batches=(5,), chunk_size=256):
    metric = Fidelity(GRID.num_patches, levels)
    for images, of_images, labels in zip(
        pictures.split(batches), scores.split(batches), LABELS.split(batches), strict=True
    ):
        metric.update(*sweep(predict, images, of_images, labels, levels, fill, chunk_size))
    return metric


@pytest.mark.parametrize(
    "levels", [2, 5, 7, 17, 21]
)  # 16 patches, so that 7 and 21 levels do not fall on whole patches
@pytest.mark.parametrize("fill", [0.0, BLACK], ids=["zero", "black"])
def test_curves_areas_and_errors_are_the_papers_on_uneven_batches(predict, pictures, scores, levels, fill):
    found = measure(predict, pictures, scores, levels, fill, batches=(3, 2), chunk_size=7).compute()
    curves = np.array(
        [references.fidelity_curves(predict, pictures[i], scores[i], LABELS[i], 4, levels, fill) for i in range(5)]
    )  # (5, 2, levels)
    for side, name in enumerate(("fidelity_plus", "fidelity_minus")):
        areas = [references.area(curve, 16) for curve in curves[:, side]]
        np.testing.assert_allclose(found[f"{name}_curve"], curves[:, side].mean(0), atol=1e-6)
        np.testing.assert_allclose(found[name], np.mean(areas), atol=1e-6)
        np.testing.assert_allclose(found[f"{name}_error"], np.std(areas, ddof=1) / 5**0.5, atol=1e-6)
    assert found["images"] == 5
    np.testing.assert_allclose(found["sparsity"], [references.level_size(16, levels, i) / 16 for i in range(levels)])


def test_of_equal_scores_the_earlier_patch_goes_first(predict, pictures):
    scores = torch.randint(0, 3, (5, 16)).float()
    found = measure(predict, pictures, scores, levels=9).compute()
    curves = [references.fidelity_curves(predict, pictures[i], scores[i], LABELS[i], 4, 9) for i in range(5)]
    np.testing.assert_allclose(found["fidelity_plus_curve"], np.mean([plus for plus, _ in curves], 0), atol=1e-6)


def test_the_ends_of_both_curves_are_the_whole_image_and_none_of_it(predict, pictures, scores):
    removed, preserved = sweep(predict, pictures, scores, LABELS, levels=6)
    whole = predict(pictures)[torch.arange(5), LABELS]
    nothing = predict(torch.zeros(5, 3, 16, 16))[torch.arange(5), LABELS]
    for got, expected in (
        (removed[:, 0], whole),
        (preserved[:, -1], whole),
        (removed[:, -1], nothing),
        (preserved[:, 0], nothing),
    ):
        torch.testing.assert_close(got, expected)


def test_what_a_removed_pixel_becomes_makes_a_difference(predict, pictures, scores):
    zero, black = (measure(predict, pictures, scores, 5, fill).compute()["fidelity_plus"] for fill in (0.0, BLACK))
    assert (zero - black).abs() > 1e-3


def test_the_chunk_size_makes_none(predict, pictures, scores):
    whole, chunked = (sweep(predict, pictures, scores, LABELS, 9, chunk_size=size) for size in (256, 3))
    torch.testing.assert_close(whole, chunked)


def test_removing_the_least_important_is_preserving_the_most_important(predict, pictures, scores):
    forth, back = (measure(predict, pictures, s, levels=17).compute() for s in (scores, -scores))
    torch.testing.assert_close(back["fidelity_plus_curve"], forth["fidelity_minus_curve"].flip(0))
    torch.testing.assert_close(back["fidelity_plus"], forth["fidelity_minus"])
    assert not torch.allclose(back["fidelity_plus"], forth["fidelity_plus"])


def test_without_interactions_both_fidelities_add_up_to_all_that_there_is_to_lose(pictures, scores):
    found = measure(linear, pictures, scores, levels=17).compute()
    all_there_is = (linear(pictures) - linear(torch.zeros_like(pictures)))[torch.arange(5), LABELS].mean()
    both = found["fidelity_plus_curve"] + found["fidelity_minus_curve"]
    torch.testing.assert_close(both, all_there_is.double().expand(17), rtol=0, atol=1e-4)


def test_without_interactions_no_explanation_beats_the_contributions(pictures, scores):
    contributions = torch.stack(
        [
            linear(torch.stack([references.only(image, [z], 4) for z in range(16)]))[:, label]
            for image, label in zip(pictures, LABELS, strict=True)
        ]
    )
    best = measure(linear, pictures, contributions, levels=17).compute()
    sums = (contributions - 0.3).sort(descending=True).values.cumsum(1).mean(0).double()
    torch.testing.assert_close(best["fidelity_plus_curve"][1:], sums, rtol=0, atol=1e-4)
    random, worst = (measure(linear, pictures, s, levels=17).compute() for s in (scores, -contributions))
    assert worst["fidelity_plus"] < random["fidelity_plus"] < best["fidelity_plus"]
    assert worst["fidelity_minus"] > random["fidelity_minus"] > best["fidelity_minus"]


@pytest.mark.parametrize("split", [(2, 3), (5, 0), (1, 4)])
def test_two_processes_measure_what_one_does(predict, pictures, scores, split):
    one = measure(predict, pictures, scores, 7).compute()
    parts = []
    for start, count in ((0, split[0]), (split[0], split[1])):
        metric = Fidelity(GRID.num_patches, 7)
        if count:
            some = slice(start, start + count)
            metric.update(*sweep(predict, pictures[some], scores[some], LABELS[some], 7))
        parts.append(metric)
    parts[0].merge_state(parts[1])
    merged = parts[0].compute()
    assert merged.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(merged[name], value)


def test_one_image_has_no_error_and_reset_forgets_it(predict, pictures, scores):
    metric = Fidelity(GRID.num_patches, 5)
    metric.update(*sweep(predict, pictures[:1], scores[:1], LABELS[:1], 5))
    found = metric.compute()
    assert "fidelity_plus_error" not in found and "fidelity_minus_error" not in found
    assert found["fidelity_plus"].isfinite() and found["images"] == 1
    metric.reset()
    metric.update(*sweep(predict, pictures, scores, LABELS, 5))
    torch.testing.assert_close(
        metric.compute()["fidelity_plus"], measure(predict, pictures, scores, 5).compute()["fidelity_plus"]
    )


def test_a_sweep_leaves_no_gradients(predict, pictures, scores):
    removed, preserved = sweep(predict, pictures.requires_grad_(), scores, LABELS, 5)
    assert not removed.requires_grad
    assert not preserved.requires_grad
