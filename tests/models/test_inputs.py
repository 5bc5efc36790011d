"""What a model is given: images of uint8, which may not have been divided by 255 before, and functionals."""

import re

import pytest
import torch

from explainers import posthoc
from explainers.errors import InputError
from explainers.models.inputs import zero_to_one
from explainers.shapley import FastSHAPNetwork


def test_images_and_functionals_of_another_kind_are_refused_by_all_that_read_them(target, grid, images):
    for reads in (target, target.normalise, FastSHAPNetwork(target, grid), zero_to_one):
        reads(images)
        for wrong in (images / 255, images.half(), images.long(), images.bool()):
            with pytest.raises(InputError, match="^expected uint8 images, .*, got "):
                reads(wrong)
    for explainer in (posthoc.GAE, posthoc.DirectPaths, posthoc.Saliency):
        for shape in [(5, 23), (4, 24), (24,), (5, 2, 23)]:
            with pytest.raises(InputError, match=re.escape(f"got float32 of shape {list(shape)}")):
                explainer(target, grid).explain(images, torch.zeros(shape))
