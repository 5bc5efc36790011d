"""The benchmark of fidelity against passes: what it computes for many passes begins with what few passes give."""

import json

import pytest
import torch

from benchmarks.curve import main
from benchmarks.curve_heatmaps import BASELINES, Batch, halves, refine_heatmaps
from benchmarks.curve_tables import draw_figure, join_files, tables
from explainers.errors import InputError
from explainers.posthoc import LIME, RISE
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


@pytest.mark.parametrize("fit", ["ranking", "shapley"])
def test_halves_are_fitted_as_refine_does(target, images, monkeypatch, fit):
    refinement = refine(None, images, CLASSES, 24, target=target, fit=fit)
    expected = refinement.heatmaps.flatten(1).double()
    pairs = refinement.pairs  # every pair twice: either half has all of them
    pairs.keep, pairs.differences = (each.repeat_interleave(2, 1) for each in (pairs.keep, pairs.differences))
    monkeypatch.setattr("benchmarks.curve_heatmaps.spearman", lambda *fits: fits)
    for fitted in halves(refinement):
        torch.testing.assert_close(fitted, expected, rtol=1e-4, atol=1e-5)


def results(**numbers):
    settings = {"removals": ["zero"], "images": 2}
    values = {"fidelity_plus": [0.5, 0.75], "fidelity_minus": [0.25, 0.0]}
    worse = {"fidelity_plus": [0.25, 0.25], "fidelity_minus": [0.5, 0.5]}
    kept = {
        "AnyHead": {"fidelity": {"0": worse, "16": values}, "yardstick": {"GAE": [0.5, 1.0]}},
        "LIME": {"fidelity": {"16": worse, "64": values}},
        "cost": {"cost": {"16": [[1.0, 1.0], [1.5, 1.0], [2.0, 1.0]]}},
    }
    return {"settings": settings | numbers, "numbers": {name: {"zero/0": each} for name, each in kept.items()}}


def test_tables_and_the_figure_have_what_was_measured():
    found = json.loads(json.dumps(results()))
    text = tables(found)
    assert "| AnyHead | 0.250 / 0.500 | 0.625 / 0.125 |  |" in text
    assert "| AnyHead 16 − LIME 64 | +0.000 ± 0.000 | +0.000 ± 0.000 |" in text
    assert "| AnyHead 0 | ≤ 16, ≤ 16 |" in text and "| AnyHead 16 | 64, 64 |" in text
    assert "| GAE | AnyHead | 0.750 | 0.250 |" in text and "| 16 | 1.500 |" in text
    assert [axis.get_xscale() for axis in draw_figure(found).axes] == ["log", "log"]


def test_a_table_has_the_images_that_all_explainers_have():
    found = results(images=4)
    numbers = found["numbers"]
    numbers["AnyHead"]["zero/2"] = numbers["AnyHead"]["zero/0"]
    numbers["LIME"]["zero/4"] = numbers["LIME"]["zero/0"]
    numbers["none"] = {}  # not started
    text = tables(found)
    assert "## zero, 2 of 4 images" in text and "| none" not in text
    assert "| AnyHead 16 − LIME 64 | +0.000 ± 0.000 | +0.000 ± 0.000 |" in text
    assert "| GAE | AnyHead | 0.750 | 0.250 |" in text


def test_files_are_joined_if_nothing_contradicts():
    first, second = results(), results()
    second["numbers"] = {"AnyHead": {"zero/2": second["numbers"]["AnyHead"]["zero/0"]}}
    found = join_files([first, second])["numbers"]
    assert found.keys() == {"AnyHead", "LIME", "cost"} and found["AnyHead"].keys() == {"zero/0", "zero/2"}
    with pytest.raises(InputError, match="^expected files with equal settings, got"):
        join_files([results(), results(levels=3)])
    with pytest.raises(InputError, match="^expected a batch in one file, got AnyHead zero/0 in two: leave out one"):
        join_files([results(), results()])


def test_without_images_or_files_nothing_is_measured(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "--data or --read is needed" in capsys.readouterr().err
