from functools import partial

import pytest
import torch
from commands import composed
from hydra.utils import instantiate
from torch import nn

from explainers.networks.light import LightNetwork
from explainers.target import TargetModel
from explainers.tve.general import General
from explainers.tve.module import TVE
from explainers.tve.oracle import Oracle

LIGHT = partial(LightNetwork, blocks=[0, 1], width=12, depth=1)
TASK = torch.tensor([0, 1, 1, 0, 1])  # what a classifier of two classes predicts


@torch.no_grad()
def test_without_a_map_the_prediction_of_the_general_classifier_is_explained(target, grid, images):
    tve = TVE(target, grid, LIGHT)
    predicted = target(images).argmax(1)
    assert not torch.equal(predicted, TASK)
    assert torch.equal(General(tve, target)(images, TASK), tve(images, predicted))
    assert torch.equal(General(tve, target)(images, 1 - TASK), tve(images, predicted))


@torch.no_grad()
def test_with_a_map_the_counterpart_of_the_class_is_explained(target, grid, images):
    oracle = Oracle(target, grid, hops=1)
    heatmaps = General(oracle, target, class_map=[4, 2])(images, TASK)
    assert torch.equal(heatmaps, oracle(images, torch.tensor([4, 2, 2, 4, 2])))
    assert not torch.equal(heatmaps, oracle(images, TASK))


def test_a_class_that_the_map_does_not_hold_is_named(target, grid, images):
    with pytest.raises(ValueError, match="class_map holds 2 classes of the task, and class 3 came"):
        General(Oracle(target, grid), target, class_map=[4, 2])(images, TASK + 2)


def test_a_general_class_that_the_classifier_does_not_know_is_named(target, grid):
    with pytest.raises(ValueError, match="class_map names general class 5, and the general classifier has 5 classes"):
        General(Oracle(target, grid), target, class_map=[4, 5])


@torch.no_grad()
def test_the_map_moves_with_the_module_and_is_not_saved(target, grid):
    general = General(Oracle(target, grid), target, class_map=(4, 2))
    assert general.class_map.tolist() == [4, 2]
    assert not any("class_map" in name for name in general.state_dict())


@pytest.mark.parametrize("name", ["tve_hg", "vit_shapley_general"])
def test_an_evaluation_keeps_the_general_head_for_it(name, tmp_path):
    """`eval.py` gives the head of the task to every explainer that has a `target` of its own."""
    cfg = composed(
        "experiment=quickstart_eval",
        "target=tiny",
        f"+explainer@explainers.{name}={name}",
        folder=tmp_path,
        config="eval",
    )
    node = cfg.explainers[name]
    assert "target" not in node
    torch.manual_seed(0)
    general = instantiate(node)
    assert isinstance(general.classifier, TargetModel)
    assert isinstance(general.classifier.head, nn.Linear)
    assert general.classifier.head.out_features == 10  # the general classifier's, and not a task's 2
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    assert general(images, torch.tensor([0, 1])).shape == (2, 8, 8)
