import copy
import functools
import hashlib
import json

import pytest
from explainers.results.file import ResultsFile

from explainers.errors import InputError
from explainers.report.results import read_columns, read_results

CONFIG = {
    "seed": 0,
    "data_dir": "/here",
    "cache_dir": "cache",
    "name": "run",
    "target": {"_target_": "x", "checkpoint_path": ""},
    "grid": {"patch_size": 8},
    "explainers": {"tve": {"weights": None, "surrogate": None, "chunk_size": 256, "network": {"width": 24}}},
    "evaluation": {"levels": 11, "chunk_size": 256},
    "trainer": {"precision": "32-true", "devices": 1, "limit_test_batches": None},
    "figures": None,
    "tasks": {
        "odd": {"head": None, "data": {"root": "/here/odd", "num_workers": 1, "limit": 5}},
        "loop": {"head": None, "data": {"root": "/here/loop", "num_workers": 1, "limit": 5}},
    },
}


DATA = {"odd": {"images": "5", "image": "a1", "transform": {"size": (32, 32)}}, "loop": {"images": "5", "image": "b2"}}
"""Task → fingerprint of its data set."""


class Measured:
    """An evaluation after its test."""

    columns = {"fidelity_plus": "Fidelity⁺ ↑"}

    def __init__(self, results, identity, scores=None):
        self.results, self.identity, self.scores = results, lambda: identity, scores


def changed(key, value):
    config = copy.deepcopy(CONFIG)
    *path, last = key.split(".")
    functools.reduce(dict.__getitem__, path, config)[last] = value
    return config


@pytest.fixture
def path(tmp_path):
    """Both tasks, measured."""
    file = ResultsFile(tmp_path / "results.json", CONFIG, DATA)
    for number, task in enumerate(CONFIG["tasks"]):
        file.add(task, Measured({"tve": {"fidelity_plus": number}}, {"images": 5}))
    return tmp_path / "results.json"


BOTH = {"odd": ["tve"], "loop": ["tve"]}


def written(path):
    return json.loads(path.read_text())


def test_the_file_holds_what_its_numbers_are_traced_by(path):
    content = written(path)
    assert content["config"] == CONFIG
    (record,) = content["runs"]
    assert record["measured"] == {"odd": ["tve"], "loop": ["tve"]}
    assert record["command"] and record["python"] and record["devices"] and record["packages"]["torch"]
    assert content["results"]["loop"] == {"tve": {"fidelity_plus": 1}} and content["identity"]["odd"] == {"images": 5}
    assert content["data"]["odd"]["transform"] == {"size": [32, 32]}
    assert content["columns"] == dict.fromkeys(CONFIG["tasks"], {"fidelity_plus": "Fidelity⁺ ↑"})
    assert read_columns([path, path]) == {"fidelity_plus": "Fidelity⁺ ↑"} and read_columns([]) == {}


def test_a_task_that_was_measured_alike_is_kept_and_told(path, capsys):
    file = ResultsFile(path, CONFIG, DATA)
    assert file.kept == {"odd": ["tve"], "loop": ["tve"]}
    assert file.missing("odd") is None
    file.print_changes()
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and told[0].startswith("odd: not measured again: tve; ") and "fresh=true" in told[0]


@pytest.mark.parametrize("key", ["name", "trainer.devices", "tasks.odd.data.num_workers", "explainers.tve.chunk_size"])
def test_what_has_no_effect_on_the_numbers_measures_nothing_again(path, key):
    assert ResultsFile(path, changed(key, 16), DATA).kept == BOTH


@pytest.mark.parametrize("key", ["seed", "target._target_", "evaluation.levels", "trainer.limit_test_batches"])
def test_what_has_an_effect_on_the_numbers_measures_all_again_and_is_named(path, key, capsys):
    before = path.read_text()
    file = ResultsFile(path, changed(key, 21), DATA)
    assert file.kept == {} and path.read_text() == before
    file.print_changes()
    assert capsys.readouterr().out.count(key) == 2
    file.add("odd", Measured({"tve": {"fidelity_plus": 7}}, {}))
    assert written(path)["results"] == {"odd": {"tve": {"fidelity_plus": 7}}}
    assert (path.parent / "results_earlier.json").read_text() == before


def test_an_explainer_that_is_added_is_the_only_one_to_be_measured(path):
    config = changed("explainers.chance", {"seed": 0}) | {"methods": ["GAE", {"RISE": {"masks": 8}}]}
    config["explainers"] = {"chance": {"seed": 0}} | config["explainers"]
    file = ResultsFile(path, config, DATA)
    assert file.kept == BOTH and file.changed == {}
    assert file.missing("odd") == ["chance", "GAE", "RISE(masks=8)"]
    file.add("odd", Measured({name: {"fidelity_plus": 9} for name in file.missing("odd")}, {"images": 5}))
    content = written(path)
    assert list(content["results"]["odd"]) == ["chance", "tve", "GAE", "RISE(masks=8)"]  # in the order of the config
    assert content["results"]["odd"]["tve"] == {"fidelity_plus": 0}
    assert [record["measured"] for record in content["runs"]] == [BOTH, {"odd": ["chance", "GAE", "RISE(masks=8)"]}]
    assert ResultsFile(path, config, DATA).missing("odd") is None
    assert not (path.parent / "results_earlier.json").exists()


def test_an_explainer_of_other_settings_is_the_only_one_to_be_measured_again(path):
    both = changed("explainers.chance", {"seed": 0})
    file = ResultsFile(path, both, DATA)
    file.add("odd", Measured({"chance": {"fidelity_plus": 9}}, {"images": 5}))
    other = copy.deepcopy(both)
    other["explainers"]["tve"]["network"]["width"] = 48
    file = ResultsFile(path, other, DATA)
    assert file.kept == {"odd": ["chance"]} and file.missing("odd") == ["tve"]
    assert file.missing("loop") == ["tve", "chance"]
    assert file.changed["tve on odd"] == "explainers.tve.network.width: 24 → 48"
    assert written(path.with_name("results_earlier.json"))["results"]["odd"].keys() == {"tve", "chance"}


def test_the_explainer_to_compare_with_counts_for_all(path):
    compared = changed("evaluation.reference", "tve")
    file = ResultsFile(path, compared, DATA)
    file.add("odd", Measured({"tve": {}, "chance": {}}, {}))
    assert ResultsFile(path, compared, DATA).kept == {"odd": ["tve", "chance"]}
    other = copy.deepcopy(compared)
    other["explainers"]["tve"]["network"]["width"] = 48
    assert ResultsFile(path, other, DATA).kept == {}


def test_the_key_of_an_unfinished_test_is_of_what_it_measures(path):
    keys = [
        ResultsFile(path, config, DATA, fresh=True).key("odd")
        for config in (CONFIG, changed("name", "b"), changed("seed", 1), changed("explainers.tve.network.width", 48))
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_a_task_of_other_settings_is_measured_again_and_the_others_are_not(path):
    more = DATA | {"odd": {"images": "6", "image": "c3"}}
    file = ResultsFile(path, changed("tasks.odd.data.limit", 6), more)
    assert file.kept == {"loop": ["tve"]} and file.changed == {"odd": "data.images: 5 → 6"}
    file.add("odd", Measured({"tve": {"fidelity_plus": 7}}, {"images": 6}))
    content = written(path)
    assert list(content["results"]) == ["odd", "loop"]  # in the order of the config
    assert content["results"]["odd"]["tve"]["fidelity_plus"] == 7
    assert content["config"]["tasks"]["odd"]["data"]["limit"] == 6
    assert content["data"] == more
    assert [record["measured"] for record in content["runs"]] == [{"loop": ["tve"]}, {"odd": ["tve"]}]


def test_tasks_of_an_earlier_command_stay_beside_a_new_one(path):
    config = changed("tasks", {"digit": {"head": None, "data": {}}})
    file = ResultsFile(path, config, DATA)
    file.add("digit", Measured({}, {}))
    content = written(path)
    assert content["results"].keys() == content["config"]["tasks"].keys() == {"digit", "odd", "loop"}
    assert not (path.parent / "results_earlier.json").exists()


@pytest.mark.parametrize("key", ["explainers.tve.weights", "tasks.odd.head", "target.checkpoint_path"])
def test_weights_count_by_what_is_in_their_file(tmp_path, key):
    weights, elsewhere = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weights.write_bytes(b"trained"), elsewhere.write_bytes(b"trained")
    config = changed(key, str(weights))
    file = ResultsFile(tmp_path / "results.json", config, DATA)
    file.add("odd", Measured({"tve": {}}, {}))
    assert written(tmp_path / "results.json")["files"] == {str(weights): hashlib.sha256(b"trained").hexdigest()}
    assert ResultsFile(tmp_path / "results.json", changed(key, str(elsewhere)), DATA).kept == {"odd": ["tve"]}
    weights.write_bytes(b"trained longer")
    assert ResultsFile(tmp_path / "results.json", config, DATA).kept == {}


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
