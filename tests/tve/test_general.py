import copy
from functools import partial

import pytest
import torch
from commands import composed
from hydra.utils import instantiate
from torch import nn

from benchmarks.papers.general import General
from explainers.errors import InputError
from explainers.tve.oracle import Oracle
from explainers.tve.tve import TVE, LightNetwork

LIGHT = partial(LightNetwork, blocks=[0, 1], width=12, depth=1)
TASK = torch.tensor([0, 1, 1, 0, 1])  # what a classifier of two classes predicts


def two_classes(target):
    """A model of the task: two classes, on the same backbone."""
    task = copy.deepcopy(target)
    task.head = nn.Linear(target.embed_dim, 2)
    return task


@torch.no_grad()
def test_without_a_map_the_prediction_of_the_general_classifier_is_explained(target, grid, images):
    tve = TVE(target, grid, LIGHT)
    predicted = target(images).argmax(1)
    assert not torch.equal(predicted, TASK)
    assert torch.equal(General(two_classes(target), tve, target)(images, TASK), tve(images, predicted))
    assert torch.equal(General(two_classes(target), tve, target)(images, 1 - TASK), tve(images, predicted))


@torch.no_grad()
def test_with_a_map_the_counterpart_of_the_class_is_explained(target, grid, images):
    oracle = Oracle(target, grid, hops=1)
    heatmaps = General(two_classes(target), oracle, target, class_map=[4, 2])(images, TASK)
    assert torch.equal(heatmaps, oracle(images, torch.tensor([4, 2, 2, 4, 2])))
    assert not torch.equal(heatmaps, oracle(images, TASK))


@torch.no_grad()
def test_an_explainer_of_another_backbone_explains_the_class_of_the_same_number(target, make_target, grid, images):
    other = make_target(seed=1)
    oracle = Oracle(other, grid, hops=1)
    heatmaps = General(target, oracle, other, class_map="same")(images, TASK)
    assert torch.equal(heatmaps, oracle(images, TASK))


@pytest.mark.parametrize("class_map", [[4], [4, 5], "same", "sane"])
def test_a_map_that_does_not_fit_the_task_and_the_classifier_is_refused(target, grid, class_map):
    with pytest.raises(InputError, match="class"):
        General(two_classes(target), Oracle(target, grid), target, class_map=class_map)


@pytest.mark.parametrize("name", ["tve_hg", "vit_shapley_general"])
def test_an_evaluation_keeps_the_general_head_for_it(name, tmp_path):
    """`eval.py` gives the target of the task to every explainer; this one explains by the general head anyway."""
    cfg = composed("target=tiny", f"explainers=[{name}]", folder=tmp_path, config="eval")
    torch.manual_seed(0)
    task = instantiate(cfg.target, head=nn.Linear(48, 2))
    general = instantiate(cfg.explainers[name], target=task)
    assert general.classifier.head.out_features == 10  # the general classifier's, and not the task's 2
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    assert general(images, torch.tensor([0, 1])).shape == (2, 8, 8)
