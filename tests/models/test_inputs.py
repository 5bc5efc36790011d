"""What a model is given: uint8 images, and labels and classes that it has."""

import re

import pytest
import torch
from torch import nn

from explainers import posthoc
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.inputs import validate_classes, zero_to_one
from explainers.shapley import FastSHAPNetwork
from explainers.tve import PaperNetwork

SMALL = {"encoder": {"width": 16, "depth": 1, "heads": 2}, "decoder": {"width": 8, "depth": 1, "heads": 2}}
NORMALISING = {
    "target": lambda target, grid: target,
    "normalise": lambda target, grid: target.normalise,
    "paper": lambda target, grid: PaperNetwork(target, grid, **SMALL, head_layers=2),
    "fastshap": FastSHAPNetwork,
    "function": lambda target, grid: zero_to_one,
}


@pytest.mark.parametrize("name", NORMALISING)
def test_images_that_are_not_uint8_are_refused_by_all_that_normalise(target, grid, images, name):
    """They may have been divided by 255 before."""
    normalising = NORMALISING[name](target, grid)
    normalising(images)
    for wrong in (images / 255, images.half(), images.long(), images.bool()):
        dtype = str(wrong.dtype).removeprefix("torch.")
        with pytest.raises(InputError, match=f"^expected uint8 images, .*, got {dtype}: give the pixels of the file, "):
            normalising(wrong)


@pytest.mark.parametrize(
    "classes", [torch.zeros(3, 1, dtype=torch.long), torch.zeros((), dtype=torch.long), 3, [0, 1, 2]]
)
def test_there_is_one_class_for_each_image_in_a_tensor(classes):
    with pytest.raises(InputError, match="one class for each of 3 images"):
        validate_classes(classes, torch.zeros(3, 3, 8, 8), num_classes=2)


def test_a_head_of_several_layers_has_as_many_classes_as_logits(make_model, make_target, images):
    head = nn.Sequential(nn.Linear(24, 9), nn.ReLU(), nn.Linear(9, 7))
    target = TargetModel(make_model(), head=head).eval()
    assert target.num_classes == target(images).shape[1] == 7
    assert make_target("deit_tiny_distilled_patch16_224").num_classes == 5


@pytest.mark.parametrize("explainer", [posthoc.GAE, posthoc.DirectPaths, posthoc.Saliency, posthoc.DecompX])
def test_functionals_of_another_shape_than_the_embedding_are_refused(explainer, target, grid, images):
    for shape in [(5, 23), (4, 24), (24,), (5, 2, 23)]:
        with pytest.raises(InputError, match=re.escape(f"got float32 of shape {list(shape)}")):
            explainer(target, grid).explain(images, torch.zeros(shape))
