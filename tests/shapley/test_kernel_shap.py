import math

import pytest
import references
import torch
from toys import game, look_up, members

from explainers.masking import PatchGrid
from explainers.shapley.coalition_values import CoalitionValues
from explainers.shapley.kernel_shap import KernelSHAP, ShapleyLabels, fit_shapley

GRID = PatchGrid(image_size=24, patch_size=8)


@pytest.fixture
def target(make_target):
    """It sees 24 × 24 pixels in 3 × 3 patches, and so has 512 coalitions."""
    return make_target(img_size=24)


@pytest.fixture
def images():
    return torch.randint(0, 256, (5, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def batch(images):
    return {"image": images, "label": torch.tensor([3, 0, 4, 1, 1]), "index": torch.tensor([70, 3, 12, 5, 8])}


def test_all_coalitions_with_the_weights_of_the_shapley_kernel_give_the_exact_shapley_values(target, images):
    values, exact = game(target, images[0])
    coalitions = [coalition for coalition in values if 0 < len(coalition) < 9]
    assert len(coalitions) == 2**9 - 2
    sizes = [len(coalition) for coalition in coalitions]
    weights = torch.tensor([8 / (math.comb(9, size) * size * (9 - size)) for size in sizes])
    rows = look_up(values, coalitions)
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(fit_shapley(*rows, weights[None])[0], exact, rtol=0, atol=1e-5)
    assert (fit_shapley(*rows)[0] - exact).abs().max() > 1e-3  # every coalition counting alike is another question


@pytest.mark.parametrize(("count", "weighted"), [(1, False), (12, True), (40, True), (40, False)])
def test_the_fit_is_the_constrained_least_squares_of_the_reference(count, weighted):
    """Of 16 patches: up to 12 coalitions do not determine them."""
    keep = torch.rand(3, count, 16) < 0.5
    values, null, grand = torch.randn(3, count, 2), torch.randn(3, 2), torch.randn(3, 2)
    weights = torch.rand(3, count) + 0.1 if weighted else None
    found = fit_shapley(keep, values, null, grand, weights)
    for image in range(3):
        for label in range(2):
            expected = references.kernel_shap(
                members(keep[image]),
                values[image, :, label].tolist(),
                null[image, label].item(),
                grand[image, label].item(),
                16,
                weights[image].tolist() if weighted else None,
            )
            torch.testing.assert_close(found[image, :, label].double(), expected, rtol=1e-4, atol=1e-5)


def test_labels_are_the_fit_to_coalition_values_of_the_class_asked_for(target, batch):
    rows = CoalitionValues(target, GRID, 40, seed=3)(batch)
    expected = fit_shapley(rows["keep"], rows["values"], rows["null"], rows["grand"])  # (B, N, K)
    every = ShapleyLabels(target, GRID, 40, classes="all", seed=3)(batch)
    assert every.keys() == {"shapley"}
    torch.testing.assert_close(every["shapley"], expected, rtol=0, atol=1e-6)
    predicted = target(batch["image"]).argmax(-1)
    assert not torch.equal(predicted, batch["label"])
    for classes, explained in (("label", batch["label"]), ("predicted", predicted)):
        one = ShapleyLabels(target, GRID, 40, classes=classes, seed=3)(batch)
        assert one.keys() == {"explained", "shapley"}
        assert torch.equal(one["explained"], explained)
        assert one["shapley"].shape == (5, 9)
        torch.testing.assert_close(one["shapley"], expected[torch.arange(5), :, explained], rtol=0, atol=1e-6)


def test_an_image_has_the_same_label_alone_and_in_any_order_and_in_every_epoch_and_chunk(target, batch):
    labels = ShapleyLabels(target, GRID, 20)
    found = labels(batch)["shapley"]
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = labels({name: value[order] for name, value in batch.items()})["shapley"]
    torch.testing.assert_close(shuffled, found[order], rtol=0, atol=1e-5)
    for i in range(5):
        alone = labels({name: value[i : i + 1] for name, value in batch.items()})["shapley"]
        torch.testing.assert_close(alone, found[i : i + 1], rtol=0, atol=1e-5)
    assert torch.equal(labels(batch, epoch=7)["shapley"], found)
    chunked = ShapleyLabels(target, GRID, 20, chunk_size=7)(batch)["shapley"]
    torch.testing.assert_close(chunked, found, rtol=0, atol=1e-5)
    elsewhere = labels(batch | {"index": batch["index"] + 100})["shapley"]
    assert (elsewhere - found).abs().amax(1).min() > 1e-4


def test_the_explainer_comes_to_the_exact_shapley_values_as_its_budget_grows(target, images):
    exact = game(target, images[1], lambda normalised: target.score_images(normalised).log())[1][:, 2].view(3, 3)
    error = []
    for budget in (16, 200, 3000):
        fits = [
            KernelSHAP(target, GRID, budget, "log_probability", seed=seed) for seed in range(1 if budget == 3000 else 4)
        ]
        found = [shap(images[1:2], torch.tensor([2]))[0] for shap in fits]
        error.append(torch.stack([(each - exact).square().mean().sqrt() for each in found]).mean().item())
    assert error[0] > 1.5 * error[1] > 1.5**2 * error[2]
    assert error[2] < 0.03 * (exact.max() - exact.min())
