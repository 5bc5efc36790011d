import math
from functools import partial

import pytest
import references
import timm
import torch
from conftest import TINY_VIT
from toys import batch_of, equal, fit, state

from explainers.models import TargetModel
from explainers.runtime.sampling import stream
from explainers.shapley.coalition_draws import random_coalitions
from explainers.shapley.networks import LightShapleyNetwork
from explainers.shapley.shapley import Shapley
from explainers.shapley.surrogate import Surrogate

ADAM = partial(torch.optim.Adam, lr=3e-3)
LIGHT = partial(LightShapleyNetwork, blocks=[0, 1], width=12, depth=1)


@torch.no_grad()
def test_the_loss_is_the_divergence_from_what_the_target_says_of_the_whole_image(target, grid, images):
    surrogate = Surrogate(target, grid, ADAM, seed=2).eval()
    target = surrogate.target
    target.head.weight.mul_(0.7)  # as after some tuning
    keep = random_coalitions(torch.arange(5), 16, 1, stream("coalitions", 2, 3))[:, 0]
    divergences = []
    for image, visible in zip(target.normalise(images), keep, strict=True):
        taught = surrogate.teacher.score_images(image[None])[0]
        said = target.score_images(references.only(image, visible.nonzero()[:, 0].tolist(), 4)[None])[0]
        divergences.append(sum(p.item() * math.log(p / q) for p, q in zip(taught, said, strict=True)))
    assert surrogate.loss(batch_of(images), 3).item() == pytest.approx(sum(divergences) / 5, rel=1e-4)


@pytest.mark.slow
def test_training_brings_masked_images_closer_to_whole_ones_and_leaves_the_teacher_as_it_was(make_target, grid, images):
    target = make_target(drop_path_rate=0.3)
    surrogate, before = Surrogate(target, grid, ADAM), state(target)
    start = surrogate.eval().loss(batch_of(images), 1000).item()
    fit(surrogate.train(), images, epochs=12)
    assert surrogate.eval().loss(batch_of(images), 1000) < start / 2
    assert equal(state(surrogate.teacher), before)
    assert equal(state(target), before) and not equal(state(surrogate.target), before)


def test_an_exported_surrogate_is_a_checkpoint_of_timm_and_can_be_explained(make_target, grid, images, tmp_path):
    surrogate = Surrogate(make_target(), grid, ADAM)
    fit(surrogate, images, epochs=2)
    surrogate.eval().export(tmp_path)
    path = str(tmp_path / "target.safetensors")
    again = TargetModel(
        timm.create_model("vit_tiny_patch16_224", num_classes=5, checkpoint_path=path, **TINY_VIT)
    ).eval()
    torch.testing.assert_close(again(images), surrogate(images))
    whole = Shapley(make_target(), grid, LIGHT, surrogate=path).eval()
    direct = Shapley(again, grid, LIGHT).eval()
    direct.network.load_state_dict(whole.network.state_dict())
    assert whole.identity() == direct.identity() != Shapley(make_target(), grid, LIGHT).identity()
    torch.testing.assert_close(whole(images), direct(images))
