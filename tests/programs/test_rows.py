"""Everything that can change a number of an evaluation changes its settings, and nothing else does."""

import copy
import hashlib
from collections.abc import Mapping

import pytest
from commands import composed
from hydra.utils import instantiate
from omegaconf import OmegaConf

from explainers.running.rows import BATCHES, NOT_MEASURED, hash_files, list_settings
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


def settings(config, hashes=(), processes=1):
    """Explainer → settings, on one task."""
    return list_settings("odd", config, {}, dict(hashes), processes)


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


def changed(config, path, value=None):
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    node = config
    for name in parents:
        node = node[name]
    node[last] = value or other(node[last])
    return config


def test_every_key_counts_but_those_with_a_reason(config):
    before, seen, without_effect = settings(config), [], {*NOT_MEASURED} - {"tasks", "explainers", "methods"}
    for path, _ in leaves(config):
        names = path.split(".")
        if path.startswith(DATA):
            expected = path.removeprefix(DATA) in BATCHES  # the others change the fingerprint: see below
        elif path.startswith(("tasks.five_or_more", "tasks.loop")) or names[-1] in WITHOUT_EFFECT:
            expected = False
        else:
            expected = not {".".join(names[: i + 1]) for i in range(len(names))} & without_effect
        assert (settings(changed(config, path)) != before) == expected, path
        seen.append(path)
    assert len(seen) > 150
    assert settings(config | {"unknown": 1}) != before
    assert all(
        any(f"{path}.".startswith(f"{name}.") for path in seen) for name in NOT_MEASURED
    )  # none outlives its key


def test_the_number_of_processes_counts_where_each_measures_a_part_of_its_batches(config):
    parts = [{"limit_test_batches": 1}, {"limit_test_batches": 0.5}, {"fast_dev_run": True}, {"fast_dev_run": 3}]
    for limits, counts in ((parts, True), ([{"limit_test_batches": 1.0}, {}], False)):
        for limit in limits:
            limited = config | {"trainer": config["trainer"] | limit}
            assert (settings(limited) != settings(limited, processes=2)) == counts, limit


def differing(config, other):
    one, two = settings(config), settings(other)
    return [name for name in one if one[name] != two[name]]


def test_a_change_of_one_explainer_is_no_change_of_the_others_but_that_of_the_reference(config):
    assert config["evaluation"]["reference"] == "oracle"
    assert differing(config, changed(config, "explainers.tve.hops")) == ["tve"]
    assert differing(config, changed(config, "explainers.oracle.hops")) == [*settings(config)]
    own = copy.deepcopy(config)
    own["tasks"]["odd"]["explainers"] = {"tve": {"weights": "own"}}
    assert differing(config, own) == ["tve"]


@pytest.mark.parametrize("key", ["explainers.tve.weights", "tasks.odd.target.head", "target.model.checkpoint_path"])
def test_weights_count_by_what_is_in_their_file(config, tmp_path, key):
    weights, elsewhere = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weights.write_bytes(b"trained"), elsewhere.write_bytes(b"trained")
    one, two = (changed(config, key, str(path)) for path in (weights, elsewhere))
    before = settings(one, hash_files(one))
    assert hash_files(one)[str(weights)] == hashlib.sha256(b"trained").hexdigest()
    assert settings(two, hash_files(two)) == before
    weights.write_bytes(b"trained longer")
    assert settings(one, hash_files(one)) != before


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
