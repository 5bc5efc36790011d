"""Results of several files stand in one table only if whatever changes a number is equal: argument by argument."""

import copy
import inspect
import json

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader
from toys import SILENT

from benchmarks.papers.approximation import Subsets, TwoPointStudy
from datamodules.digits import Digits
from explainers.errors import InputError
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.masking import PatchGrid
from explainers.posthoc.baselines import Chance
from explainers.report.results import read_columns, read_results
from explainers.report.tables import rows

COUNTS = {
    "target": lambda target, grid: other_weights(target),
    "grid": lambda target, grid: PatchGrid(32, 16, differs=True),
    "levels": lambda *_: 5,
    "until": lambda *_: 0.5,
    "removals": lambda *_: ["black"],
    "order": lambda *_: "pixels",
    "empty": lambda *_: False,
    "probes": lambda *_: ["saco"],
    "classes": lambda *_: "label",
    "reference": lambda *_: "other",
    "hops": lambda *_: 1,
    "patches": lambda *_: 5,
    "subsets": lambda *_: [3],
    "seed": lambda *_: 1,
}
COLUMNS_OF_THEIR_OWN = {"curves": ["deletion"], "localization": [], "agreement": ["iou"], "k": 5}
"""Arguments that add or leave out columns, and change no number of another one."""
NO_NUMBER = {"chunk_size": "memory"}


def other_weights(target):
    changed = copy.deepcopy(target)
    with torch.no_grad():
        changed.backbone.norm.bias.add_(1)
    return changed


def evaluation(target, grid, **changed):
    explainers = {name: Chance(None, grid, seed) for seed, name in enumerate(("one", "other"))}
    settings = {"grid": grid, "reference": "one", "levels": 3, "agreement": ["rank_correlation"]} | changed
    return EvaluationModule(target, explainers, Evaluation(**settings))


def study(target, grid, **changed):
    return TwoPointStudy(target, {}, Subsets(**{"grid": grid, "patches": 4, "subsets": [2]} | changed))


def write(path, module, name, **content):
    parts = {"results": {name: {"iou": 0.5}}, "identity": module.identity(), "columns": module.columns} | content
    path.write_text(json.dumps({part: {"odd": value} for part, value in parts.items()}))
    return path


@pytest.mark.parametrize("build", [evaluation, study])
def test_every_argument_counts_or_has_a_reason(build, target, grid, tmp_path):
    kind = {evaluation: Evaluation, study: Subsets}[build]
    first = write(tmp_path / "first", build(target, grid), "first")
    for name in {"target", *inspect.signature(kind).parameters}:
        if name in NO_NUMBER:
            continue
        value = COLUMNS_OF_THEIR_OWN[name] if name in COLUMNS_OF_THEIR_OWN else COUNTS[name](target, grid)
        second = write(tmp_path / "second", build(**{"target": target, "grid": grid, name: value}), "second")
        if name in COLUMNS_OF_THEIR_OWN:
            assert read_results([first, second])["odd"].keys() == {"first", "second"}
        else:
            with pytest.raises(InputError, match="odd"):
                read_results([first, second])


def test_the_precision_counts(target, grid, tmp_path):
    files, samples = [], Digits("test", size=3, image_size=32)
    for number, precision in enumerate(("32-true", "bf16-mixed")):
        module = evaluation(target, grid)
        trainer = Trainer(accelerator="cpu", precision=precision, inference_mode=False, **SILENT)
        trainer.test(module, DataLoader(samples, batch_size=3), verbose=False)
        files.append(write(tmp_path / str(number), module, str(number)))
    with pytest.raises(InputError, match="they differ in precision: 32-true → bf16-mixed: measure both alike"):
        read_results(files)


def test_another_k_is_another_column(make_target, grid, tmp_path):
    target = make_target(num_classes=10)
    settings = ({"agreement": ["iou"], "k": k} for k in (5, 3))
    files = [write(tmp_path / f"{i}", evaluation(target, grid, **each), f"{i}") for i, each in enumerate(settings)]
    table = rows(read_results(files), read_columns(files))
    assert [[row[f"IoU@{k} ↑"] for k in (5, 3)] for row in table] == [["0.500", "–"], ["–", "0.500"]]


def test_a_reference_of_one_name_and_other_settings_is_another(target, grid, tmp_path):
    identities = [{"reference": "one", "settings of the reference": {"hops": hops}} for hops in range(2)]
    files = [write(tmp_path / f"{i}", evaluation(target, grid), f"{i}", identity=identities[i]) for i in range(2)]
    with pytest.raises(InputError, match="they differ in settings of the reference.hops: 0 → 1: measure both alike"):
        read_results(files)


def test_files_without_these_keys_are_read_and_each_is_compared_with_all_before(target, grid, tmp_path):
    old = {"identity": {"levels": 3}, "columns": {}}
    files = [write(tmp_path / "old", evaluation(target, grid), "old", **old)]
    files += [write(tmp_path / name, evaluation(target, grid, reference=name), name) for name in ("one", "other")]
    assert read_results(files[:2])["odd"] == {"old": {"iou": 0.5}, "one": {"iou": 0.5}}
    with pytest.raises(InputError, match="they differ in reference: one → other"):
        read_results(files)
