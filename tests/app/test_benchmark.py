"""`explainers benchmark` computes what an evaluation computes, without Lightning."""

import torch
from lightning import Trainer
from torch.utils.data import DataLoader
from toys import SILENT

from explainers.app.benchmark import COLUMNS, CURVES, LEVELS, measure
from explainers.evaluation import Evaluation
from explainers.posthoc import GAE, Chance


def test_the_numbers_are_those_of_an_evaluation(target, grid, images):
    method = GAE(target, grid)
    explainers = {
        "Chance": Chance(None, grid),
        "GAE": method,
        "function": lambda images, classes: method(images, classes),
    }
    results, scores = measure(target, explainers, images.split(2))
    samples = [{"image": image, "label": -1, "index": number} for number, image in enumerate(images)]
    evaluation = Evaluation(grid, curves=CURVES, levels=LEVELS)(target, explainers)
    Trainer(accelerator="cpu", **SILENT).test(evaluation, DataLoader(samples, batch_size=2), verbose=False)
    for name, expected in evaluation.results.items():
        for number in (*CURVES, *[f"{curve}_error" for curve in CURVES], "forward_passes"):
            torch.testing.assert_close(results[name][number], expected[number])
            if number in CURVES:
                torch.testing.assert_close(scores.rows[name][number], evaluation.scores.rows[name][number])
        assert results[name]["seconds_per_image"] > 0
    assert COLUMNS.keys() <= results["GAE"].keys()
    assert all(results["function"][curve] == results["GAE"][curve] for curve in CURVES)
