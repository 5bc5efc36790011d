"""The benchmark of fidelity against passes: what it computes for many passes begins with what few passes give."""

import json

import pytest
import torch

from benchmarks.curve_heatmaps import ASKED, BASELINES, Batch, explain_once, halves, refine_heatmaps
from benchmarks.curve_tables import draw_figure, join_files, tables
from explainers.errors import InputError
from explainers.posthoc import LIME, RISE, Occlusion
from explainers.refinement import refine
from explainers.shapley import KernelSHAP

CLASSES = torch.tensor([3, 0, 4, 1, 1])
PASSES = [16, 24, 40]
BUDGETS = {
    "KernelSHAP": lambda target, grid, passes, removal: KernelSHAP(target, grid, passes, removal=removal),
    "LIME": lambda target, grid, passes, removal: LIME(target, grid, passes, removal=removal),
    "RISE": lambda target, grid, passes, removal: RISE(target, grid, passes),
}


@pytest.mark.parametrize("removal", ["zero", "drop"])
@pytest.mark.parametrize("name", BUDGETS)
def test_a_prefix_of_many_passes_is_the_explainer_with_few(name, removal, target, grid, images):
    found = BASELINES[name](Batch(target, grid, images, CLASSES, PASSES, removal))
    assert list(found) == PASSES
    for passes, heatmaps in found.items():
        expected = BUDGETS[name](target, grid, passes, removal)(images, CLASSES)
        torch.testing.assert_close(heatmaps, expected, rtol=1e-3, atol=1e-4)


def test_refined_heatmaps_are_those_of_refine(target, grid, images):
    found, refinement = refine_heatmaps(None, Batch(target, grid, images, CLASSES, PASSES))
    for passes in PASSES:
        torch.testing.assert_close(found[passes], refine(None, images, CLASSES, passes, target=target).heatmaps)


def test_halves_of_the_passes_agree_on_an_additive_model(additive, images):
    target, _ = additive
    assert halves(refine(None, images, CLASSES, 120, target=target)).min() > 0.9


def test_a_method_as_it_is_has_its_heatmaps_and_counted_passes(target, grid, images):
    method = Occlusion(target, grid)
    heatmaps, spent = explain_once(method, Batch(target, grid, images, CLASSES, [16]))
    torch.testing.assert_close(heatmaps[ASKED], method(images, CLASSES))
    assert spent[ASKED] == [method.forward_passes] * 5


def results(**numbers):
    settings = {"removals": ["zero"], "images": 2}
    values = {"fidelity_plus": [0.5, 0.75], "fidelity_minus": [0.25, 0.0]}
    worse = {"fidelity_plus": [0.25, 0.25], "fidelity_minus": [0.5, 0.5]}
    kept = {
        "AnyHead": {"fidelity": {"0": worse, "16": values}, "yardstick": {"GAE": [0.5, 1.0]}},
        "LIME": {"fidelity": {"16": worse, "64": values}},
        "Search": {"fidelity": {"0": worse}, "spent": {"0": [40, 60]}},
        "cost": {"cost": {"16": [[1.0, 1.0], [1.5, 1.0], [2.0, 1.0]]}},
    }
    return {"settings": settings | numbers, "numbers": {name: {"zero/0": each} for name, each in kept.items()}}


def test_tables_and_the_figure_have_what_was_measured_of_the_images_that_all_explainers_have():
    found = json.loads(json.dumps(results()))
    found["numbers"]["AnyHead"]["zero/2"] = found["numbers"]["AnyHead"]["zero/0"]
    text = tables(found)
    assert "| AnyHead | 0 | 0.250 | 0.500 |" in text and "| AnyHead | 16 | 0.625 | 0.125 |" in text
    assert "| AnyHead 16 − LIME 16 | +0.375 ± 0.125 | -0.375 ± 0.125 |" in text
    assert "| AnyHead 16 − LIME 64 | +0.000 ± 0.000 | +0.000 ± 0.000 |" in text and "| AnyHead 16 − Search 50 |" in text
    assert "| AnyHead 0 | ≤ 16, ≤ 16 | ≤ 50, ≤ 50 |" in text and "| AnyHead 16 | 64, 64 | > 50, > 50 |" in text
    assert "| GAE | AnyHead | 0.750 | 0.250 |" in text and "| 16 | 1.500 |" in text
    assert [axis.get_xscale() for axis in draw_figure(found).axes] == ["log", "log"]


def test_files_are_joined_if_nothing_contradicts():
    first, second = results(), results()
    second["numbers"] = {"AnyHead": {"zero/2": second["numbers"]["AnyHead"]["zero/0"]}}
    found = join_files([first, second])["numbers"]
    assert found.keys() == {"AnyHead", "LIME", "Search", "cost"} and found["AnyHead"].keys() == {"zero/0", "zero/2"}
    other = {"settings": {"removals": ["drop"], "images": 2}, "numbers": {}}
    assert join_files([results(), other])["settings"]["removals"] == ["zero", "drop"]
    with pytest.raises(InputError, match="^expected files with equal settings, got"):
        join_files([results(), results(levels=3)])
