"""Everything that can change a number of an evaluation changes its settings, and nothing else does."""

import copy
from collections.abc import Mapping

import pytest
from commands import composed
from explainers.results.file import BATCHES, NOT_MEASURED, list_explainers, list_settings
from hydra.utils import instantiate
from omegaconf import OmegaConf

from explainers.saved.identity import WITHOUT_EFFECT

COMMAND = (
    "experiment=demo/eval",
    "explainers=[chance,tve,tve_paper,tve_hg,vit_shapley_general,kernel_shap,oracle]",
    "methods=[GAE,{TokenTM:{scale:softmax}}]",
    "reference=paper",
    "figures=[curves]",
    "tasks.odd.data.eval_batch_size=4",
)
DATA = "tasks.odd.data."


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    cfg = composed(*COMMAND, folder=folder, config="eval")
    OmegaConf.set_struct(cfg, False)
    for missing in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, missing, "given")
    plain = OmegaConf.to_container(cfg, resolve=True)
    plain["reference"]["values"] = {"ViT-Base": {"odd": {"tve": {"fidelity_plus": 0.5}}}}  # without dots in names
    return plain


def everything(task, config, hashes):
    """The settings of a task and of its explainers."""
    return list_settings(task, config, hashes, {}), list_explainers(task, config, hashes)


def leaves(node, path=""):
    """(Path, value) of every leaf of a config; a list of options is one."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from leaves(value, f"{path}.{name}".lstrip("."))
    else:
        yield path, node


def other(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "other"]
    return f"{value} or another"


def changed(config, path):
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    node = config
    for name in parents:
        node = node[name]
    node[last] = other(node[last])
    return config


def excluded(path):
    """Whether the tables of exclusions, each with its reason, name a key or one that it is in."""
    names = path.split(".")
    parents = {".".join(names[: i + 1]) for i in range(len(names))} - {"tasks"}
    return names[-1] in WITHOUT_EFFECT or bool(parents & NOT_MEASURED.keys())


def test_every_key_counts_but_those_with_a_reason(config):
    before, seen = everything("odd", config, {}), []
    for path, _ in leaves(config):
        counts = everything("odd", changed(config, path), {}) != before
        if path.startswith(DATA):
            expected = path.removeprefix(DATA) in BATCHES  # the others change the fingerprint: see below
        else:
            expected = not excluded(path) and not path.startswith(("tasks.five_or_more", "tasks.loop"))
        assert counts == expected, path
        seen.append(path)
    assert len(seen) > 150
    named = [name for name in NOT_MEASURED if any(path == name or path.startswith(f"{name}.") for path in seen)]
    assert named == list(NOT_MEASURED)  # no exclusion outlives its key
    assert {path.split(".")[-1] for path in seen} >= WITHOUT_EFFECT.keys()
    assert all([*NOT_MEASURED.values(), *WITHOUT_EFFECT.values()])


def test_the_number_of_processes_counts_where_each_measures_a_part_of_its_batches(config):
    parts = [{"limit_test_batches": 1}, {"limit_test_batches": 0.5}, {"fast_dev_run": True}, {"fast_dev_run": 3}]
    for limits, counts in ((parts, True), ([{"limit_test_batches": 1.0}, {}], False)):
        for limit in limits:
            limited = config | {"trainer": config["trainer"] | limit}
            one, two = (list_settings("odd", limited, {}, {}, processes) for processes in (1, 2))
            assert (one != two) == counts, limit


def test_a_change_of_one_explainer_is_no_change_of_the_others(config):
    before = everything("odd", config, {})
    for path, name in (("explainers.tve.hops", "tve"), ("explainers.chance.seed", "chance")):
        shared, explainers = everything("odd", changed(config, path), {})
        differing = [key for key in explainers if explainers[key] != before[1][key]]
        assert differing == [name]
        assert (shared == before[0]) == (name != config["evaluation"]["reference"])
    own = copy.deepcopy(config)
    own["tasks"]["odd"]["explainers"] = {"tve": {"weights": "own"}}
    shared, explainers = everything("odd", own, {})
    assert shared == before[0] and [key for key in explainers if explainers[key] != before[1][key]] == ["tve"]


VALUES = {"task": "loop", "domain": "plain", "without": "small", "scraps": 7, "size": {"test": 5}, "image_size": 48}
WITHOUT_EFFECT_ON_A_TEST = {"seed": "determines the training order", "batch_size": "counts by itself", **WITHOUT_EFFECT}


def test_every_key_of_the_data_changes_their_fingerprint_or_has_a_reason(config):
    """Of data sets of files: see `test_datasets`."""
    own = dict(config["tasks"]["odd"]["data"], size={"test": 4})
    keys = own.keys() - {"_target_", "eval_batch_size"}
    assert keys == {*VALUES, *(WITHOUT_EFFECT_ON_A_TEST.keys() & keys)}
    for key in keys:
        mixed = {"domain": "mixed"} if key == "without" else {}
        now = instantiate(own | {key: VALUES.get(key, 3)} | mixed).fingerprint("test")
        fingerprint = instantiate(own | mixed).fingerprint("test")
        assert (now == fingerprint) == (key in WITHOUT_EFFECT_ON_A_TEST), key


def test_the_place_of_data_and_caches_does_not_count(config):
    def placed(data_dir, cache_dir):
        own = copy.deepcopy(config) | {"data_dir": data_dir, "cache_dir": cache_dir}
        own["explainers"]["oracle"]["cache_dir"] = f"{cache_dir}/oracle"
        own["tasks"]["odd"]["data"]["root"] = f"{data_dir}/odd"
        return everything("odd", own, {})

    assert placed("data", "cache") == placed("/elsewhere", "/else/where")
