"""The attribute `linear` of every white-box method is True exactly if the method is linear in the functional."""

import pytest
import torch

from explainers import posthoc
from explainers.errors import InputError
from explainers.posthoc import method_names
from explainers.posthoc.layerwise import Layerwise, Transitions
from explainers.posthoc.white_box import WhiteBox

METHODS = [name for name in method_names() if issubclass(getattr(posthoc, name), WhiteBox)]
LINEAR = {
    *("InputXGradient", "AttIxG", "GradCAM", "XGradCAM", "XGradCAMPlus", "FullGrad", "CAT", "AttCAT", "HiResCAM"),
    *("AttentionGradient", "ConservativeLRP", "DecompX", "AttnLRP", "ResLRP", "LibraGrad"),
}


def build_variants(name, target, grid):
    """A method by its name, with the rules of LibraGrad, and with every aggregation that takes it."""
    found, of = {}, getattr(posthoc, name)
    kinds = ["", "-PLUS"] if issubclass(of, Layerwise) else [""]
    kinds += ["-Rollout"] if issubclass(of, Transitions) else []
    for full in [f"{prefix}{name}{kind}" for prefix in ("", "Libra") for kind in kinds]:
        try:
            found[full] = posthoc.build(full, target, grid)
        except InputError as error:
            assert full.startswith("Libra") and "plain gradients" in str(error)
    return found


def measure_departure(method, images):
    """Compute the maximum of |a(v + 2 w) − a(v) − 2 a(w)|, relative to the maximum of |a(v + 2 w)|."""
    v, w = torch.randn(2, len(images), 24, generator=torch.Generator().manual_seed(3))
    of_v, of_w, of_sum = method.explain(images, torch.stack([v, w, v + 2 * w], 1)).unbind(1)
    return ((of_sum - of_v - 2 * of_w).abs().max() / of_sum.abs().max()).item()


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_say_so_are_linear_in_the_functional_and_no_others(target, grid, images, name):
    images = images[:1]
    for full, method in build_variants(name, target, grid).items():
        with_relu = name == "GradCAM" and not full.endswith("PLUS")
        assert method.linear == (name in LINEAR and not full.endswith("-Rollout") and not with_relu), full
        found = measure_departure(method, images)
        assert found < 1e-4 if method.linear else found > 1e-2, full
