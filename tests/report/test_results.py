import json
from types import SimpleNamespace

import pytest
import torch

from explainers.errors import InputError
from explainers.metrics.means import ImageScores
from explainers.report.results import Row, join_rows, load_scores, read_results, read_scores, scores_file, write_scores

VALUES = {"odd": [0.5, torch.nan, 1.5], "loop": [-1.0, 1.0]}
"""Task → number of each image."""
RUN = {"command": ["eval.py"], "devices": ["CPU"]}


def measured(folder, task, explainer, add=0.0, **settings):
    """A row after its measurement."""
    values = torch.tensor(VALUES[task]) + add
    row = Row(folder, task, explainer, {"seed": 0, **settings})
    evaluation = SimpleNamespace(
        results={explainer: {"fidelity_plus": values.nanmean().item(), "iou": 1.0}},
        columns={"fidelity_plus": "Fidelity⁺ ↑", "iou": "IoU@3 ↑"},
        identity=lambda: {"images": len(values), "reference": settings.get("reference")},
        scores=ImageScores(torch.arange(len(values)), {explainer: {"fidelity_plus": values}}),
    )
    row.write(evaluation, RUN)
    return row


@pytest.fixture
def rows(tmp_path):
    return [measured(tmp_path, *names) for names in (("odd", "tve"), ("odd", "chance"), ("loop", "tve"))]


@pytest.fixture
def path(tmp_path, rows):
    join_rows(tmp_path / "results.json", rows, config={"seed": 0})
    return tmp_path / "results.json"


def test_the_file_holds_what_its_numbers_are_traced_by(path, rows):
    content = json.loads(path.read_text())
    assert content["config"] == {"seed": 0} and content["identity"]["odd"]["images"] == 3
    assert content["runs"] == [RUN | {"measured": {"odd": ["tve", "chance"], "loop": ["tve"]}}]
    assert content["rows"]["loop"] == {"tve": rows[2].key}
    assert content["results"].keys() == VALUES.keys() and content["results"]["loop"]["tve"]["fidelity_plus"] == 0
    assert read_results([path]) == read_results([row.path for row in rows])


def test_another_setting_is_another_file_and_the_first_difference_to_the_latest_is_named(tmp_path, rows):
    settings = {"seed": 0, "network": {"width": 48}}
    other = Row(tmp_path, "odd", "tve", settings)
    assert not other.path.exists() and other.find_change() == "network: None → {'width': 48}"
    assert Row(tmp_path, "odd", "tve", {"seed": 0}).path == rows[0].path
    assert Row(tmp_path, "odd", "tve-hg", settings).find_change() is None
    measured(tmp_path, "odd", "tve", add=1, network={"width": 48})
    before = {row.path: json.loads(row.path.read_text())["results"] for row in rows}
    assert before[rows[0].path]["odd"]["tve"]["fidelity_plus"] == 1 and other.path.exists()


def test_scores_are_read_as_they_were_measured(path):
    scores = read_scores([path])
    assert scores.keys() == VALUES.keys() and scores["odd"].index.tolist() == [0, 1, 2]
    assert scores["odd"].rows.keys() == {"tve", "chance"}
    torch.testing.assert_close(scores["odd"].rows["tve"]["fidelity_plus"], torch.tensor(VALUES["odd"]), equal_nan=True)


def test_scores_of_several_files_are_joined_by_image_under_the_names_of_tables(path, tmp_path):
    other = tmp_path / "more.json"
    results, columns = {"late": {"iou": 2.0}, "tve": {"fidelity_plus": 9.0}}, {"iou": "IoU@3 ↑"}
    other.write_text(json.dumps({"results": {"odd": results}, "columns": {"odd": columns}}))
    late = {"late": {"iou": torch.tensor([1.0, 3.0])}, "tve": {"fidelity_plus": torch.tensor([9.0, 9.0])}}
    write_scores(other, {"odd": ImageScores(torch.tensor([2, 5]), late)})
    scores = read_scores([path, other])["odd"]
    assert scores.index.tolist() == [0, 1, 2, 5]
    nan = torch.nan
    found = scores.rows["tve"]["fidelity_plus"], scores.rows["late"]["iou_3"]
    torch.testing.assert_close(
        found, (torch.tensor([0.5, nan, 1.5, nan]), torch.tensor([nan, nan, 1, 3])), equal_nan=True
    )


def test_scores_of_another_measurement_are_left_out_and_a_damaged_file_is_named(path):
    results = {"odd": {"tve": {"fidelity_plus": 1.0}}}
    for values in (torch.ones(2), torch.zeros(3)):  # of another length, with another mean
        write_scores(path, {"odd": ImageScores(torch.arange(3), {"tve": {"fidelity_plus": values}})})
        assert load_scores(path, results) == {}
    scores_file(path).write_bytes(b"damaged")
    with pytest.raises(InputError, match="results_scores.safetensors"):
        read_scores([path])
    write_scores(path, {})
    assert not scores_file(path).exists()


def save(path, results, **identity):
    path.write_text(json.dumps({"results": results, "identity": dict.fromkeys(results, identity)}))
    return path


def test_files_are_read_together(tmp_path):
    files = [
        save(tmp_path / "a", {"odd": {"tve": {"x": 1}, "chance": {"x": 0, "images_per_second": 10}}}, accuracy=0.5),
        save(tmp_path / "b", {"odd": {"lime": {"x": 2}, "chance": {"x": 0, "images_per_second": 20}}}, accuracy=0.6),
        save(tmp_path / "c", {"loop": {"tve": {"x": 3}}}, levels=5),
    ]
    results = read_results(files)
    assert list(results) == ["odd", "loop"] and list(results["odd"]) == ["tve", "chance", "lime"]
    assert results["odd"]["chance"]["images_per_second"] == 10 and results["loop"]["tve"] == {"x": 3}
    assert read_results([]) == {}


def test_results_that_contradict_each_other_are_refused(tmp_path):
    files = [save(tmp_path / name, {"odd": {"tve": {"x": number}}}) for number, name in enumerate("ab")]
    with pytest.raises(InputError, match="(?s)one result of tve on odd, got two.*/a and .*/b: "):
        read_results(files)
    for number, name in enumerate("ab"):
        save(tmp_path / name, {"odd": {name: {}}}, levels=number)
    with pytest.raises(InputError, match="odd in .*/a and .*/b cannot be compared.*levels: 0 → 1"):
        read_results(files)
    for name in "ab":
        (tmp_path / name).write_text(json.dumps({"results": {"odd": {name: {}}}, "data": {"odd": {"image": name}}}))
    with pytest.raises(InputError, match="cannot be compared, they differ in data.image: a → b"):
        read_results(files)


def test_another_file_is_refused_by_name(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(InputError, match="no results at .*x.json: .*eval.py"):
        read_results([path])
    no_json = (b"", b"no JSON", b"[" * 10**5, b"9" * 5000, b"\xff")
    for text in (*no_json, b"[]", b"{}", b'{"results": {"odd": 3}}', b'{"results": {"odd": {"GAE": 3}}}'):
        path.write_bytes(text)
        with pytest.raises(InputError, match="x.json: expected the results.json of an evaluation"):
            read_results([path])
