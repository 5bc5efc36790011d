import pytest
import references_faithfulness
import torch
from conftest import wake
from scipy.stats import spearmanr
from torch import nn
from toys import equal, state

from explainers.metrics.means import MeanOfValues
from explainers.metrics.sanity import add_noise, max_sensitivity, random_weights, randomisation, replace_weights
from explainers.posthoc import InputXGradient
from explainers.saved.identity import weights_hash

INDEX = torch.tensor([3, 0, 2**35, 7, 9])


def explain(images, classes):
    """Something nonlinear that depends on the class, (B, 4, 4)."""
    means = images.float().unflatten(-1, (4, 8)).unflatten(-3, (4, 8)).mean((1, 3, 5))
    return (means / 20 + classes[:, None, None]).sin()


@pytest.mark.parametrize("radius", [0.02, 0.3])
def test_noise_is_uniform_within_its_radius_and_different_for_every_value(radius):
    grey = torch.full((5, 3, 32, 32), 127, dtype=torch.uint8)
    noise = add_noise(grey, INDEX, 0, radius).double() - 127
    assert noise.abs().max() == round(255 * radius)
    assert noise.mean().abs() < 5 * 255 * radius / 3**0.5 / noise.numel() ** 0.5
    assert noise.std().item() == pytest.approx(255 * radius / 3**0.5, rel=0.03)
    assert torch.corrcoef(noise.flatten(1)).triu(1).abs().max() < 0.1
    assert (noise[0] != noise[0, 0, 0, 0]).double().mean() > 0.8


def test_noise_depends_on_the_image_and_the_draw_alone_and_stays_in_the_range_of_pixels(images):
    noisy = add_noise(images, INDEX, 1, 0.5)
    assert torch.equal(noisy[2:3], add_noise(images[2:3], INDEX[2:3], 1, 0.5))
    assert not torch.equal(noisy, add_noise(images, INDEX, 2, 0.5))
    change = noisy.int() - images.int()
    assert change.abs().max() == 127  # a value that wrapped around would change by more
    assert (noisy == 255).any() and (noisy == 0).any()


def test_max_sensitivity_is_that_of_loops(images):
    classes, heatmaps = torch.arange(5), explain(images, torch.arange(5))
    found = max_sensitivity(explain, images, classes, INDEX, heatmaps, draws=3, radius=0.1)
    noisy = torch.stack([add_noise(images, INDEX, draw, 0.1) for draw in range(3)], 1)  # (B, 3, C, H, W)
    expected = [
        references_faithfulness.max_sensitivity(explain, images[i], classes[i], noisy[i], heatmaps[i]) for i in range(5)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_metric_leaves_out_heatmaps_of_zeros(images):
    heatmaps = torch.ones(5, 4, 4)
    heatmaps[1] = 0
    values = max_sensitivity(lambda images, classes: torch.full((5, 4, 4), 1.5), images, INDEX, INDEX, heatmaps, 1)
    assert values.isnan().tolist() == [False, True, False, False, False]
    metric = MeanOfValues()
    metric.update(values)
    assert metric.compute().item() == pytest.approx(0.5)


def test_drawn_weights_have_the_mean_and_spread_of_the_trained_ones_and_nothing_else():
    layer = nn.Sequential(nn.Linear(80, 80), nn.BatchNorm1d(80), nn.Linear(80, 80))
    with torch.no_grad():
        layer[0].weight.mul_(0.2).add_(3)
        layer[1].weight.fill_(0.5)
    drawn = random_weights(layer)
    assert drawn.keys() == dict(layer.named_parameters()).keys()
    weight = drawn["0.weight"]
    assert weight.mean().item() == pytest.approx(layer[0].weight.mean().item(), abs=1e-3)
    assert weight.std().item() == pytest.approx(layer[0].weight.std().item(), rel=0.05)
    assert torch.corrcoef(torch.stack([weight.flatten(), layer[0].weight.flatten()]))[0, 1].abs() < 0.06
    assert torch.corrcoef(torch.stack([weight.flatten(), drawn["2.weight"].flatten()]))[0, 1].abs() < 0.06
    assert (drawn["1.weight"] == 0.5).all()  # no spread
    assert equal(drawn, random_weights(layer)) and not equal(drawn, random_weights(layer, seed=1))
    alone = random_weights(nn.ModuleDict({"0": layer[0]}))
    assert torch.equal(alone["0.weight"], weight)  # the other parameters do not matter


def batch_normalised():
    layers = nn.Conv2d(3, 8, 8, stride=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    return wake(nn.Sequential(*layers)).to(memory_format=torch.channels_last).eval()


@pytest.mark.parametrize("build", ["target", batch_normalised])
def test_a_randomised_model_has_exactly_its_own_weights_afterwards_also_after_an_exception(request, images, build):
    model = request.getfixturevalue(build) if build == "target" else build()
    pictures = images if build == "target" else images / 255
    before, identity, logits = state(model), weights_hash(model), model(pictures)
    with pytest.raises(KeyError), replace_weights(model, random_weights(model, seed=3)):
        inside = state(model)
        assert weights_hash(model) != identity
        assert not torch.allclose(model(pictures), logits, atol=1e-2) and model(pictures).isfinite().all()
        raise KeyError
    assert equal(state(model), before) and weights_hash(model) == identity
    assert torch.equal(model(pictures), logits)
    parameters = dict(model.named_parameters())
    spread = {name for name, weight in parameters.items() if weight.std() > 0}
    assert len(spread) > 4 and {name for name in before if not torch.equal(before[name], inside[name])} == spread
    assert all(weight.requires_grad and weight.grad is None for weight in parameters.values())


def test_gradients_explain_the_random_model_and_constants_do_not(target, grid, images):
    gradients, classes = InputXGradient(target, grid), torch.arange(5)
    trained = gradients(images, classes)
    with replace_weights(target, random_weights(target)):
        random = gradients(images, classes)
    expected = [abs(spearmanr(trained[i].flatten(), random[i].flatten()).statistic) for i in range(5)]
    assert randomisation(trained, random).tolist() == pytest.approx(expected, abs=1e-6) and sum(expected) / 5 < 0.6
    constant = torch.ones(1, 4, 4)
    unmoved = torch.cat([trained, constant, constant]), torch.cat([-trained, trained[:1], constant])
    assert randomisation(*unmoved).tolist() == pytest.approx([1] * 7)
    assert randomisation(trained[:1], constant).item() == 0
