import json

import pytest
import torch
from explainers.results.file import ResultsFile

from explainers.errors import InputError
from explainers.report.results import ImageScores, load_scores, read_scores, scores_file, write_scores

CONFIG = {"explainers": {"tve": None, "chance": None}, "tasks": {"odd": {}, "loop": {}}, "target": "t"}
DATA = {"odd": {"images": 3}, "loop": {"images": 2}}
VALUES = {"odd": [0.5, torch.nan, 1.5], "loop": [-1.0, 1.0]}


class Measured:
    """An evaluation after its test."""

    columns = {"fidelity_plus": "Fidelity⁺ ↑", "iou": "IoU@3 ↑"}

    def __init__(self, task, names, add=0.0):
        values = torch.tensor(VALUES[task]) + add
        self.results = {name: {"fidelity_plus": values.nanmean().item(), "iou": 1.0} for name in names}
        row = {"fidelity_plus": values, "iou": torch.ones(len(values))}
        self.scores = ImageScores(torch.arange(len(values)), dict.fromkeys(names, row))

    def identity(self):
        return {}


def measured(path, explainers, tasks=("odd", "loop"), fresh=False, add=0.0):
    """A command that measures what is missing."""
    file = ResultsFile(path, CONFIG | {"explainers": dict.fromkeys(explainers)}, DATA, fresh)
    for task in tasks:
        if names := file.missing(task):
            file.add(task, Measured(task, names, add))
    return path


@pytest.fixture
def path(tmp_path):
    return measured(tmp_path / "results.json", ["tve"])


def test_scores_are_read_as_they_were_measured(path):
    scores = read_scores([path])
    assert scores.keys() == DATA.keys() and scores["odd"].index.tolist() == [0, 1, 2]
    row = scores["odd"].rows["tve"]
    torch.testing.assert_close(row["fidelity_plus"], torch.tensor(VALUES["odd"]), equal_nan=True)
    assert row.keys() == {"fidelity_plus", "iou_3"}  # as in tables of several files


def test_an_explainer_that_is_added_joins_those_that_are_kept(path):
    measured(path, ["tve", "chance"], ["odd"])
    scores = read_scores([path])
    assert scores["odd"].rows.keys() == {"tve", "chance"} and scores["loop"].rows.keys() == {"tve"}
    assert len(scores_file(path).read_bytes()) < 1500


def test_what_is_measured_afresh_replaces_all(path):
    measured(path, ["chance"], ["loop"], fresh=True, add=2)
    scores = read_scores([path])
    assert scores.keys() == {"loop"} and scores["loop"].rows.keys() == {"chance"}
    assert read_scores([path.with_name("results_earlier.json")])["odd"].rows.keys() == {"tve"}
    torch.testing.assert_close(scores["loop"].rows["chance"]["fidelity_plus"], torch.tensor(VALUES["loop"]) + 2)


def test_scores_of_another_measurement_are_left_out(path, tmp_path):
    """The process was killed after it wrote the scores, or somebody copied one of the two files."""
    other = measured(tmp_path / "other" / "results.json", ["tve"], add=0.1)
    scores_file(path).write_bytes(scores_file(other).read_bytes())
    assert all(row.keys() == {"iou_3"} for scores in read_scores([path]).values() for row in scores.rows.values())
    scores_file(path).unlink()
    assert read_scores([path]) == {}
    assert ResultsFile(path, CONFIG, DATA).missing("odd") == ["chance"]  # results without scores are kept


def test_scores_of_several_files_are_joined_by_image(path, tmp_path):
    other = tmp_path / "more.json"
    other.write_text(json.dumps({"results": {"odd": {"late": {"saco": 2.0}, "tve": {"fidelity_plus": 9.0}}}}))
    late = {"saco": torch.tensor([1.0, 3.0])}
    write_scores(
        other,
        {"odd": ImageScores(torch.tensor([2, 5]), {"late": late, "tve": {"fidelity_plus": torch.tensor([9.0, 9.0])}})},
    )
    scores = read_scores([path, other])["odd"]
    assert scores.index.tolist() == [0, 1, 2, 5]
    nan = torch.nan
    for row, expected in (("tve", [0.5, nan, 1.5, nan]), ("late", [nan, nan, 1.0, 3.0])):
        (found,) = (values for name, values in scores.rows[row].items() if name in ("saco", "fidelity_plus"))
        torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)


def test_scores_of_another_length_are_left_out_and_a_damaged_file_is_named(path):
    results = {"odd": {"tve": {"fidelity_plus": 1.0}}}
    write_scores(path, {"odd": ImageScores(torch.arange(3), {"tve": {"fidelity_plus": torch.ones(2)}})})
    assert load_scores(path, results) == {}
    scores_file(path).write_bytes(b"damaged")
    with pytest.raises(
        InputError, match="results_scores.safetensors: expected the scores of images, got a damaged file"
    ):
        read_scores([path])
    write_scores(path, {})
    assert not scores_file(path).exists()
