import json

import numpy as np
import pytest
import references
import torch
from commands import QUIET, evaluate
from lightning import Trainer
from scipy.stats import pearsonr, spearmanr
from torch.utils.data import DataLoader

from benchmarks.papers.approximation import (
    Subsets,
    TwoPoint,
    TwoPointStudy,
    random_subsets,
)
from datamodules.digits import Digits
from explainers.masking import neighbourhoods
from explainers.runtime.sampling import stream
from explainers.tve.oracle import Oracle


def members(mask):
    return set(mask.nonzero().flatten().tolist())


@pytest.fixture
def target(make_target):
    return make_target(num_classes=10)


def test_subsets_take_each_other_patch_with_probability_one_half_and_none_of_the_neighbourhood(grid):
    index, patches = torch.arange(40), torch.arange(16).expand(40, -1)
    near = neighbourhoods(grid, 1)[patches]
    subsets = random_subsets(index, patches, near, 32, seed=0)
    assert not (subsets & near[:, :, None]).any()
    drawn = subsets.double()[(~near)[:, :, None].expand_as(subsets)]
    assert drawn.mean().item() == pytest.approx(0.5, abs=5 * 0.5 / len(drawn) ** 0.5)
    free = subsets[:, 0, :, 15].double()  # patch 15 in the subsets of patch 0: of all images and subsets
    assert abs(free.mean(0) - 0.5).max() < 0.45 and abs(free.mean(1) - 0.5).max() < 0.45


def test_subsets_depend_on_image_patch_and_seed_alone(grid):
    index, patches = torch.tensor([7, 5]), torch.tensor([[3, 1], [1, 2]])
    near = neighbourhoods(grid, 1)[patches]
    both = random_subsets(index, patches, near, 4, seed=1)
    alone = random_subsets(index[1:], patches[1:], near[1:], 4, seed=1)
    assert torch.equal(both[1:], alone)
    assert torch.equal(both, random_subsets(index, patches, near, 4, seed=1))
    assert not torch.equal(both, random_subsets(index, patches, near, 4, seed=2))


def study(target, grid, batch_size, explainers=None, **settings):
    explainers = {"two_point": TwoPoint(target, grid, hops=1)} | (explainers or {})
    module = TwoPointStudy(target, explainers, Subsets(grid, hops=1, patches=3, **settings))
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.test(module, DataLoader(Digits("test", size=5, image_size=32), batch_size), verbose=False)
    return module


def test_the_first_subsets_of_many_are_the_few_and_batches_do_not_matter(target, grid):
    small, large = (study(target, grid, size, subsets=(2, 4)).results["two_point"] for size in (2, 5))
    assert small.keys() == large.keys() and len(small["attribution"]) == 15
    for name in ("attribution", "expectation_2", "expectation_4", "pearson_2", "spearman_4"):
        assert small[name] == pytest.approx(large[name], abs=1e-4)
    assert small["expectation_2"] != small["expectation_4"]


@torch.no_grad()
def test_results_are_those_computed_by_hand(target, grid):
    """From the draws on: every number of one explainer, and what the results hold for."""
    oracle = Oracle(target, grid, hops=1)
    module = study(target, grid, 5, {"oracle": oracle}, subsets=(2, 4))
    samples = Digits("test", size=5, image_size=32)
    images = torch.stack([sample["image"] for sample in samples])
    classes = target(images).argmax(-1)
    heatmaps = oracle(images, classes).flatten(1)
    values = torch.tensor(module.results["oracle"]["attribution"]).view(5, 3)
    patches = (heatmaps[:, None] - values[..., None]).abs().argmin(-1)  # which were drawn
    torch.testing.assert_close(heatmaps.gather(1, patches), values)
    assert all(len(set(row)) == 3 for row in patches.tolist()) and len(set(map(tuple, patches.tolist()))) > 1
    near = [references.neighbourhood(patch, 4, 1) for patch in patches.flatten().tolist()]
    normalised = target.normalise(images)
    known = [(target.score_images, normalised[i // 3], classes[i // 3].item()) for i in range(15)]
    slow = [references.two_points(*args, around, 4) for args, around in zip(known, near, strict=True)]
    two_point = module.results["two_point"]
    assert two_point["attribution"] == pytest.approx(slow, abs=1e-5)
    masks = neighbourhoods(grid, 1)[patches]
    subsets = random_subsets(torch.arange(5), patches, masks, 4, stream("coalitions", 0, 0)).flatten(0, 1)
    for count in (2, 4):
        slow_means = [
            sum(references.gain(*known[i], near[i], members(subset), 4) for subset in subsets[i][:count]) / count
            for i in range(15)
        ]
        assert two_point[f"expectation_{count}"] == pytest.approx(slow_means, abs=1e-5)
        assert two_point[f"expectation_{count}"] == module.results["oracle"][f"expectation_{count}"]
    of_four = two_point["expectation_4"]
    assert two_point["pearson_4"] == pytest.approx(pearsonr(slow, of_four).statistic, abs=1e-4)
    assert two_point["spearman_4"] == pytest.approx(spearmanr(slow, of_four).statistic, abs=1e-4)
    within = [spearmanr(slow[i : i + 3], of_four[i : i + 3]).statistic for i in range(0, 15, 3)]
    assert two_point["within_images_4"] == pytest.approx(np.mean(within), abs=1e-4)
    right = [target(sample["image"][None]).argmax().item() == sample["label"] for sample in samples]
    identity = module.identity()
    assert (identity["images"], identity["hops"], identity["patches"]) == (5, 1, 3)
    assert identity["accuracy"] == pytest.approx(np.mean(right))


def test_the_study_leaves_its_table_and_figure(tmp_path):
    overrides = ("target=tiny", "tasks=[digits]", "explainers=[]", "metrics=two_point", "figures=approximation")
    small = ("tasks.digits.data.size.test=3", "tasks.digits.data.eval_batch_size=2", "evaluation.patches=2")
    evaluate(*overrides, *small, "evaluation.subsets=[2,3]", *QUIET, folder=tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["results"]["digits"]["two_point"]
    assert len(found["attribution"]) == len(found["expectation_3"]) == 6
    assert (tmp_path / "approximation.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "digits.png").exists()  # without explainers there are no heatmaps
