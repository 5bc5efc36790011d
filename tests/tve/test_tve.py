"""TVE: its loss, its training, and what it explains. `test_tve_weights` has its files."""

from functools import partial

import pytest
import references
import torch
from torch import nn
from toys import LIGHT, Given, Perfect, Small, batch_of, fit, step, training

from explainers.learned.sources import complete
from explainers.tve.oracle import Oracle
from explainers.tve.tve import TVE, TVELoss

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # steps are taken without a trainer, too


def patches(count, **settings):
    return partial(TVELoss, patches_per_image=count, **settings)


@torch.no_grad()
def test_a_perfect_network_has_no_loss(target, grid, images):
    exact, worse = (training(TVE(target, grid, partial(Perfect, hops=hops), hops=(1,)), patches(3)) for hops in (1, 0))
    assert step(exact, batch_of(images)) < 1e-8
    assert step(worse, batch_of(images)) > 0.1


@torch.no_grad()
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_perfect_network_gives_the_heatmaps_of_the_oracle(target, grid, images, score):
    target.score = score
    tve, oracle = TVE(target, grid, Perfect).eval(), Oracle(target, grid, hops=1)
    classes = torch.tensor([4, 2, 0, 1, 3])
    torch.testing.assert_close(tve(images, classes), oracle(images, classes), rtol=1e-4, atol=1e-4)
    predicted = target(images).argmax(1)
    assert not torch.equal(predicted, classes)
    torch.testing.assert_close(tve(images), oracle(images, predicted), rtol=1e-4, atol=1e-4)
    every = tve.all_classes(images)
    assert every.shape == (5, 5, 4, 4)
    for label in range(5):
        expected = oracle(images, torch.full((5,), label))
        torch.testing.assert_close(every[:, label], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loss_is_the_papers(target, grid, images, reduction):
    """Equation 7; the released code takes the mean over the width of the embedding instead of the sum."""
    tve = TVE(target, grid, LIGHT, hops=(1,))
    module = training(tve, patches(3, reduction=reduction))
    seen = complete(batch_of(images), module.sources)
    maps = [seen["map_0"], seen["map_1"]]
    expected = references.tve_loss(tve.network(images, seen["embedding"], maps), seen["meta"], seen["patch"])
    if reduction == "mean":
        expected = expected / 24
    module.initialised = True  # or the first step would initialise the network
    stored = {name: value for name, value in seen.items() if name != "image"}
    for batch in (batch_of(images), seen, stored):
        torch.testing.assert_close(step(module, batch), expected, rtol=1e-4, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(("h_weight", "score", "pooling"), [(0.3, "log_probability", 3), (0.0, "logit", 5)])
def test_the_released_options_are_what_they_say(target, grid, images, h_weight, score, pooling):
    meta = torch.randn(5, 16, 2, 24)
    tve = TVE(target, grid, partial(Given, meta=meta), score=score, h_weight=h_weight, pooling=pooling).eval()
    heatmaps = tve.all_classes(images)
    for i, label in ((0, 1), (4, 3)):
        expected = torch.zeros(4, 4)
        for patch in range(16):
            g, h = target.head(meta[i, patch, 0]), target.head(meta[i, patch, 1])
            if score == "log_probability":
                g, h = g - g.exp().sum().log(), h - h.exp().sum().log()
            expected[patch // 4, patch % 4] = g[label] - h_weight * h[label]
        torch.testing.assert_close(heatmaps[i, label], references.pooled(expected, pooling), rtol=1e-4, atol=1e-4)


def lively_heads(*classes):
    heads = [nn.Linear(24, k) for k in classes]
    for head in heads:
        nn.init.normal_(head.weight)
    return heads


@torch.no_grad()
@pytest.mark.parametrize("network", [Small, LIGHT])
def test_many_tasks_are_explained_as_by_an_explainer_of_each(target, make_target, grid, images, network):
    tve, heads = TVE(target, grid, network, pooling=3).eval(), lively_heads(2, 5, 7)
    for weight in tve.network.parameters():
        weight.add_(0.2 * torch.randn_like(weight))
    heatmaps = tve.explain_tasks(images, heads)
    assert heatmaps.shape == (5, 3, 4, 4)
    predicted = []
    for task, head in enumerate(heads):
        other = make_target()
        other.head = head
        predicted.append(other(images).argmax(1))
        alone = TVE(other, grid, network, pooling=3).eval()
        alone.network.load_state_dict(tve.network.state_dict())
        torch.testing.assert_close(heatmaps[:, task], alone(images), rtol=1e-4, atol=1e-5)
    assert max(len(classes.unique()) for classes in predicted) > 1  # or the first image's would do for all


class Nearly(Perfect):
    """Off by one number, which is there to be trained."""

    def __init__(self, target, grid, off):
        super().__init__(target, grid)
        self.off = nn.Parameter(torch.tensor(off))

    def forward(self, images, embeddings, maps, patches=None):
        return super().forward(images, embeddings, maps, patches) * (1 + self.off)


@pytest.mark.slow
@pytest.mark.parametrize("off", [0.03, 0.3])
def test_validation_measures_theorem_1_on_the_predicted_classes(target, grid, images, off):
    """The means over the covered patches of all batches, 4 and 1 images; of the last epoch alone."""
    still = partial(torch.optim.SGD, lr=0.0)
    module = training(TVE(target, grid, partial(Nearly, off=off), hops=(1,)), patches(3), still)
    logged = fit(module, images, epochs=2, validate=True).callback_metrics
    drawn, labels = module.loss(batch_of(images))["patch"], target(images).argmax(1)
    found = []
    for i, normalised in enumerate(target.normalise(images)):
        for g_and_h in references.meta_attribution(target.embed, normalised, 4, 1)[drawn[i]]:
            exact, predicted = (target.head(pair).softmax(-1)[:, labels[i]] for pair in (g_and_h, g_and_h * (1 + off)))
            found.append(references.error_bound(predicted.tolist(), exact.tolist()))
    covered = [row for row in found if row[0] <= 0.5]
    assert (len(covered) < len(found)) == (off == 0.3) and covered
    means = [sum(column) / len(covered) for column in zip(*covered, strict=True)]
    for name, expected in zip(("epsilon", "bound", "error"), means, strict=True):
        assert logged[f"val/theorem1_{name}"].item() == pytest.approx(expected, rel=1e-3, abs=2e-5)
    assert logged["val/theorem1_covered"].item() == pytest.approx(len(covered) / len(found))


def test_the_first_step_calibrates_a_fresh_light_network_and_no_later_one_does(target, grid, images):
    tve = TVE(target, grid, LIGHT)
    module = training(tve, patches(4))
    first = module.loss(batch_of(images[:4]))  # the first batch of the first epoch
    fit(module, images, epochs=2)
    torch.testing.assert_close(tve.network.mean_g, first["meta"][:, :, 0].mean((0, 1)))
    assert not torch.allclose(tve.network.scale, torch.ones(()))


def test_training_images_are_cropped_and_validation_images_are_not(target, grid, images):
    plain, cropping = (
        training(TVE(target, grid, partial(Given, meta=torch.zeros(5, 16, 2, 24))), min_crop=c) for c in (None, 0.3)
    )
    torch.testing.assert_close(step(cropping, batch_of(images)), step(cropping, batch_of(images)))
    assert not torch.allclose(step(cropping, batch_of(images)), step(plain, batch_of(images)))
    logged = []
    for module in (plain, cropping):
        module.log = lambda name, value, **_: logged.append((name, value.compute()))
        module.validation_step(batch_of(images), 0)
    assert logged[0] == logged[1]
