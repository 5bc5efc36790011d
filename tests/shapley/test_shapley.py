from functools import partial

import pytest
import references
import torch
from toys import batch_of, game, look_up, training

from explainers.learned.sources import complete
from explainers.masking import PatchGrid
from explainers.shapley.coalition_draws import shapley_coalitions
from explainers.shapley.coalition_values import CoalitionValues
from explainers.shapley.networks import FastSHAPNetwork, LightShapleyNetwork, ViTShapleyNetwork
from explainers.shapley.shapley import Shapley, ShapleyLoss, make_efficient, shapley_loss

GRID = PatchGrid(image_size=24, patch_size=8)
FOUR = partial(ShapleyLoss, coalitions=4)
VIT, FROZEN = ViTShapleyNetwork, partial(ViTShapleyNetwork, freeze=True)
FAST = partial(FastSHAPNetwork, backbone="test_convnext")
LIGHT = partial(LightShapleyNetwork, blocks=[0, 1], width=12, depth=1)
NETWORKS = {"vit": VIT, "frozen": FROZEN, "fast": FAST, "light": LIGHT}


@pytest.fixture
def target(make_target):
    """It sees 24 × 24 pixels in 3 × 3 patches, and so has 512 coalitions."""
    return make_target(img_size=24)


@pytest.fixture
def images():
    return torch.randint(0, 256, (5, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def loss_of(module, rows):
    return module.loss.compute(module.explainer.predict(rows), rows)


def minimise(keep, values, null, grand):
    """φ (N, K) of the least loss, of all that are efficient."""
    values, null, grand = values.double(), null.double(), grand.double()
    phi = torch.zeros(1, 9, 5, dtype=torch.double, requires_grad=True)
    search = torch.optim.LBFGS(
        [phi], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def step():
        search.zero_grad()
        loss = shapley_loss(make_efficient(phi, null, grand), keep, values, null)
        loss.backward()
        return loss

    search.step(step)
    return make_efficient(phi, null, grand).detach()[0]


def test_the_objective_over_all_coalitions_has_its_minimum_at_the_exact_shapley_values(target, images):
    """Each coalition as often as the Shapley kernel has it: of sizes 1 to 4, in proportions 105 : 15 : 5 : 3."""
    values, exact = game(target, images[0])
    often = [0, 105, 15, 5, 3, 3, 5, 15, 105, 0]
    coalitions = [coalition for coalition in values for _ in range(often[len(coalition)])]
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(minimise(*look_up(values, coalitions)), exact.double(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_training_converges_to_the_exact_shapley_values(target, images):
    """Within 2 % of their range, which runs over patches and classes; and they are efficient to 1e-5.

    The objective is the same for all networks.
    """
    images = images[:1]
    values, exact = game(target, images[0])  # (N, K)
    table = torch.stack(list(values.values()))  # the number of a coalition is the sum of 2^z
    torch.manual_seed(0)
    shapley = Shapley(target, GRID, LIGHT).train()
    module = training(shapley, FOUR)
    rows, steps = complete(batch_of(images), module.sources), 250
    adam = torch.optim.Adam(shapley.network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-2, total_steps=steps)
    for epoch in range(steps):
        keep = shapley_coalitions(torch.tensor([0]), 9, 256, seed=epoch)
        loss = loss_of(module, rows | {"keep": keep, "values": table[keep.long() @ 2 ** torch.arange(9)]})
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    with torch.no_grad():
        found = shapley.eval().all_classes(images)  # (B, K, rows, columns)
    error = (found[0].flatten(1).mT - exact).abs().max()
    assert error < 0.02 * (exact.max() - exact.min())
    effect = target(images).softmax(1) - target.score_images(torch.zeros(1, 3, 24, 24))
    torch.testing.assert_close(found.sum((2, 3)), effect, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_loss_is_the_squared_error_of_every_coalition_and_class():
    phi, values, null = torch.randn(2, 9, 5), torch.randn(2, 4, 5), torch.randn(2, 5)
    keep = torch.rand(2, 4, 9) < 0.5
    errors = []
    for image in range(2):
        for coalition in range(4):
            for label in range(5):
                guess = null[image, label].item()
                guess += sum(phi[image, patch, label].item() for patch in range(9) if keep[image, coalition, patch])
                errors.append((values[image, coalition, label].item() - guess) ** 2)
    assert shapley_loss(phi, keep, values, null).item() == pytest.approx(9 * sum(errors) / len(errors), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("network", "normalisation"), [*((each, "additive") for each in NETWORKS.values()), (LIGHT, "none")]
)
def test_heatmaps_are_what_the_network_says_and_efficient_where_asked_for(target, images, network, normalisation):
    shapley, images = Shapley(target, GRID, network, normalisation=normalisation).eval(), images[:2]
    every, predicted = shapley.all_classes(images), target(images).argmax(1)
    assert every.shape == (2, 5, 3, 3)
    torch.testing.assert_close(shapley(images), every[torch.arange(2), predicted])
    classes = torch.tensor([3, 0])
    torch.testing.assert_close(shapley(images, classes), every[torch.arange(2), classes])
    effect = target(images).softmax(1) - target.score_images(torch.zeros(1, 3, 24, 24))
    assert torch.allclose(every.sum((2, 3)), effect, atol=1e-5) == (normalisation == "additive")
    torch.testing.assert_close(shapley.all_classes(images[1:])[0], every[1], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_source_gives_what_the_target_says_of_each_coalition(target, images):
    rows = CoalitionValues(target, GRID, count=3, chunk_size=7)(batch_of(images, first=70), epoch=2)
    assert {name: tuple(row.shape) for name, row in rows.items()} == {
        "keep": (5, 3, 9),
        "values": (5, 3, 5),
        "null": (5, 5),
        "grand": (5, 5),
    }
    for i, image in enumerate(target.normalise(images)):
        seen = [set(row.nonzero()[:, 0].tolist()) for row in rows["keep"][i]] + [set(), set(range(9))]
        expected = torch.cat([target.score_images(references.only(image, patches, 3)[None]) for patches in seen])
        found = torch.cat([rows["values"][i], rows["null"][i : i + 1], rows["grand"][i : i + 1]])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_coalitions_without_the_tokens_of_other_patches(target, images):
    rows = CoalitionValues(target, GRID, count=4, chunk_size=3, score="logit", removal="drop")(batch_of(images))
    assert torch.equal(rows["keep"], CoalitionValues(target, GRID, count=4)(batch_of(images))["keep"])
    model, normalised = target.backbone, target.normalise(images)
    tokens = model._pos_embed(model.patch_embed(normalised))
    for i in range(5):
        for keep, value in zip(rows["keep"][i], rows["values"][i], strict=True):
            visible = [0] + [1 + patch for patch in keep.nonzero()[:, 0].tolist()]
            expected = target.classify(model.norm(model.blocks(tokens[i : i + 1, visible]))[:, 0])[0]
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
        nothing = target.classify(model.norm(model.blocks(tokens[i : i + 1, :1]))[:, 0])[0]
        torch.testing.assert_close(rows["null"][i], nothing, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows["grand"], target(images), rtol=1e-4, atol=1e-5)
