"""The images of a model without patches of its own: of its config's size, which no grid changes without a word."""

import pytest
import timm
import torch

from explainers import posthoc
from explainers.masking import find_patch_size
from explainers.models import TargetModel, as_target

PRIMES = {(331, 331): 330, (188, 188): 187, (106, 106): 105}
"""Sizes that no patches of 8 to 32 pixels divide → the nearest that some do."""


def test_patches_divide_the_images_of_all_of_timms_weights_but_three_sizes():
    sizes = {timm.get_pretrained_cfg(name).input_size[1:] for name in timm.list_pretrained()}
    patches = {size: find_patch_size(size) for size in sizes}
    assert {size for size, patch in patches.items() if size[0] % patch or size[1] % patch} == set(PRIMES)
    assert {size[0] - size[0] % patches[size] for size in PRIMES} == set(PRIMES.values())
    assert {patch for size, patch in patches.items() if size[0] % 16 == size[1] % 16 == 0} == {16}


@pytest.mark.parametrize(("size", "shape"), [((95, 95), (5, 5)), ((75, 60), (5, 4)), ((28, 28), (2, 2))])
def test_a_cnn_takes_the_size_of_its_config(size, shape):
    model = timm.create_model("test_resnet", num_classes=3, pretrained_cfg_overlay={"input_size": (3, *size)})
    for target in (TargetModel(model), as_target(timm.create_model("test_resnet", num_classes=3), image_size=size)):
        assert target.grid.size == target.transform.size == size and target.grid.shape == shape
    images = torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8)
    assert posthoc.build("GradCAM", target.eval(), target.grid)(images, torch.tensor([0])).shape == (1, *shape)
    assert posthoc.build("Occlusion", target, target.grid, {"cells": 2})(images, torch.tensor([0])).shape == (1, *shape)


def test_a_size_that_no_patches_divide_is_changed_with_a_word():
    model = timm.create_model("test_resnet", pretrained_cfg_overlay={"input_size": (3, 331, 331)})
    with pytest.warns(UserWarning, match="no patches divide images of 331 × 331 pixels: they become 330 × 330"):
        assert TargetModel(model).transform.size == (330, 330)
