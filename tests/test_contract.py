"""What holds for every explainer (see `explainers.Explainer`)."""

import copy
from functools import partial

import pytest
import torch

from explainers.networks.light import LightNetwork
from explainers.networks.paper import PaperNetwork
from explainers.posthoc.chance import Chance
from explainers.shapley.kernel_shap import KernelSHAP
from explainers.training.weights import copy_target
from explainers.tve.module import TVE
from explainers.tve.oracle import Oracle
from explainers.vectors.heads import FixedHead, simplex
from explainers.vectors.self_explaining import SelfExplaining

PAPER = {
    "width": 16,
    "depth": 1,
    "heads": 2,
    "decoder_width": 8,
    "decoder_depth": 1,
    "decoder_heads": 2,
    "head_layers": 3,
}
EXPLAINERS = {
    "chance": lambda target, grid: Chance(grid),
    "oracle": partial(Oracle, hops=1),
    "tve_light": partial(TVE, network=partial(LightNetwork, blocks=[0, 1], width=12, depth=1)),
    "tve_paper": partial(TVE, network=partial(PaperNetwork, **PAPER)),
    "tve_shared": partial(TVE, network=partial(PaperNetwork, **PAPER, shared_trunk=True)),
    "tve_released": partial(
        TVE, network=partial(PaperNetwork, **PAPER, token_mixing=True), score="logit", h_weight=0.0, pooling=5
    ),
}


def self_explaining(target, grid):
    own = copy_target(target)
    own.head = FixedHead(simplex(5, own.embed_dim))
    return SelfExplaining(own, grid, alpha=1)


EXPLAINERS |= {"kernel_shap": partial(KernelSHAP, budget=40), "self_explaining": self_explaining}
CLASSES = torch.tensor([3, 0, 4, 1, 1])


@pytest.fixture(params=EXPLAINERS)
def explainer(request, target, grid):
    explainer = EXPLAINERS[request.param](target, grid).eval()
    with torch.no_grad():
        for weight in (weight for name, weight in explainer.named_parameters() if not name.startswith("target.")):
            weight.add_(
                0.2 * torch.randn_like(weight)
            )  # as after training: fresh networks give nearly constant heatmaps
    return explainer


def modes(explainer):
    return [module.training for module in explainer.modules()]


def test_a_heatmap_has_a_score_for_every_patch_where_the_images_are(explainer, images):
    heatmaps = explainer(images, CLASSES)
    assert heatmaps.shape == (5, 4, 4)
    assert heatmaps.device == images.device
    assert heatmaps.is_floating_point()
    assert heatmaps.isfinite().all()
    assert (heatmaps.flatten(1).std(1) > 1e-3).all()


def test_an_image_has_the_same_heatmap_alone_as_in_a_batch(explainer, images):
    together = explainer(images, CLASSES)
    alone = torch.cat([explainer(images[i : i + 1], CLASSES[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


def test_explaining_twice_gives_the_same(explainer, images):
    first = explainer(images, CLASSES)
    torch.rand(7)
    assert torch.equal(explainer(images, CLASSES), first)


def test_images_and_classes_stay_as_they_are(explainer, images):
    before, classes = images.clone(), CLASSES.clone()
    explainer(images, classes)
    assert torch.equal(images, before)
    assert torch.equal(classes, CLASSES)


def test_explaining_leaves_the_target_and_the_explainer_as_they_were(explainer, target, images):
    target_before, before, mode = (
        copy.deepcopy(target.state_dict()),
        copy.deepcopy(explainer.state_dict()),
        modes(explainer),
    )
    explainer(images, CLASSES)
    for module, state in ((target, target_before), (explainer, before)):
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert modes(explainer) == mode
    assert not any(module.training for module in target.modules())
    assert all(weight.grad is None for module in (target, explainer) for weight in module.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in target.modules())


def test_an_explainer_keeps_the_classes_apart(explainer, images):
    same = torch.allclose(explainer(images, CLASSES), explainer(images, (CLASSES + 1) % 5), atol=1e-4)
    assert same == isinstance(explainer, Chance)


def test_another_seed_is_another_chance(grid, images):
    assert not torch.equal(Chance(grid)(images, CLASSES), Chance(grid, seed=1)(images, CLASSES))


def test_chance_favours_no_patch(grid):
    images = torch.randint(0, 256, (2000, 3, 8, 8), dtype=torch.uint8)
    heatmaps = Chance(grid)(images, torch.zeros(2000, dtype=torch.long))
    peaks = heatmaps.flatten(1).argmax(1).bincount(minlength=16)
    assert (peaks - 125).abs().max() < 60  # five standard deviations
    assert (heatmaps.mean(0) - 0.5).abs().max() < 0.04
