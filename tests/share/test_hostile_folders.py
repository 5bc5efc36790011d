"""Folders from elsewhere: `explainers.load` builds what it knows, and refuses everything else in one line."""

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import yaml
from commands import QUIET, ROOT, composed
from conftest import wake
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import save_file

import explainers
from explainers.errors import InputError
from explainers.models.fetching import save_target
from explainers.share import reading
from explainers.share.building import check_arguments, check_permitted
from explainers.share.loadable import learned_explainer
from explainers.share.reading import CONFIG, VERSIONS, explainer_settings
from explainers.tve import LightNetwork

IMAGES = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
EXPLAINER = "explainer.safetensors"
MADE = "MADE"
"""The file that a hostile folder tries to make."""


class Program:
    """What a pickle runs when it is read."""

    def __reduce__(self):
        return Path.touch, (Path(MADE),)


class OwnNetwork(LightNetwork):
    """A network that this project does not know."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The folder of an explainer."""
    folder = tmp_path_factory.mktemp("honest")
    path = folder.parent / "target.safetensors"
    save_target(wake(instantiate(composed("target=tiny", folder=folder).target)), path)
    given = ("explainer.network.width=8", f"target.model.checkpoint_path={path}")
    cfg = composed("target=tiny", "explainers@explainer=tve", *QUIET, *given, folder=folder)
    explainer = instantiate(cfg.explainer)
    wake(explainer.network)
    explainer.export(folder)
    (folder / CONFIG).write_text(OmegaConf.to_yaml(cfg, resolve=True))
    (folder / VERSIONS).write_text("{}")
    return folder


@pytest.fixture
def folder(honest, tmp_path, monkeypatch):
    """A copy to change. What is loaded must run, make or ask for nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reading, "snapshot_download", lambda *args, **kwargs: pytest.fail("the Hub was asked"))
    (tmp_path / "given").mkdir()
    for path in honest.iterdir():
        (tmp_path / "given" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Program()))
    return tmp_path / "given"


def changed(folder, key, value):
    config = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
    *parents, last = key.split(".")
    node = config
    for name in parents:
        node = node[name]
    node[last] = value
    (folder / CONFIG).write_text(yaml.safe_dump(config))


def targets(value):
    """A change of the target, as the whole of it."""
    return lambda folder: changed(folder, "explainer.target", value)


def setting(key, value):
    return lambda folder: changed(folder, f"explainer.{key}", value)


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def link(name, text):
    """A file outside the folder, to which the folder links."""

    def change(folder):
        (folder.parent / "private").write_text(text)
        (folder / name).unlink()
        (folder / name).symlink_to(folder.parent / "private")

    return change


TOUCH = {"_target_": "subprocess.check_call", "_args_": [["touch", MADE]]}
TORCHRUN = {
    "_target_": "explainers.running.processes.torchrun",
    "processes": 1,
    "program": ["--no-python", "touch", MADE],
}
WRITE = {"_target_": "explainers.saved.files.write_atomically", "path": MADE, "text": ""}
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
FASTSHAP = {"_target_": "explainers.shapley.FastSHAPNetwork", "_partial_": True}
REFUSED = "a config from elsewhere may not name it; trust_config=True"

HOSTILE = {
    "torchrun as the target": (targets(TORCHRUN), "got 'explainers.running.processes.torchrun': " + REFUSED),
    "a file as the target": (targets(WRITE), "got 'explainers.saved.files.write_atomically': " + REFUSED),
    "an explainer": (setting("_target_", "subprocess.check_call"), "for explainer, got 'subprocess.check_call': "),
    "a network": (setting("network._target_", "torch.load"), "for explainer.network, got 'torch.load': "),
    "a grid": (setting("grid", TOUCH), "expected explainers.masking.PatchGrid for explainer.grid, got 'subprocess.ch"),
    "a program in an argument": (setting("hops", TOUCH), "for explainer.hops, got 'subprocess.check_call': "),
    "a program in a list": (
        setting("hops", [2, [WRITE]]),
        "for explainer.hops.1.0, got 'explainers.saved.files.write_at",
    ),
    "a program in timm": (setting("target.model.act_layer", TOUCH), "explainer.target.model.act_layer, got 'subproc"),
    "a program in a plain dictionary": (setting("target.model.x", {"y": TOUCH}), "for explainer.target.model.x, got "),
    "torch.hub through a module": (
        setting("target.model._target_", "explainers.tve.tve.torch.hub.load"),
        "expected timm.create_model for explainer.target.model, got 'explainers.tve.tve.torch.hub.load': ",
    ),
    "a method of Hydra": (
        setting("network", {"_target_": "hydra.utils.get_method", "path": "os.system"}),
        "get_method",
    ),
    "a network where a target stands": (
        targets({"_target_": "explainers.tve.PaperNetwork", "mae": "evil.pth"}),
        "expected explainers.models.TargetModel for explainer.target, got 'explainers.tve.PaperNetwork': ",
    ),
    "arguments by position": (setting("target.model._args_", ["x"]), "explainer.target.model._args_, got '_args_': "),
    "a function for later": (setting("target._partial_", True), "expected false for explainer.target._partial_, got "),
    "an environment variable": (
        setting("target.model.model_name", "${oc.env:HOME}"),
        "model_name, got '${oc.env:HOME}'",
    ),
    "a resolver": (setting("target.model.num_classes", "${oc.decode:'[1]'}"), "got \"${oc.decode:'[1]'}\": "),
    "a model of the Hub": (setting("target.model.model_name", "hf-hub:user/model"), "got 'hf-hub:user/model': "),
    "a model of a folder": (setting("target.model.model_name", "local-dir:given"), "got 'local-dir:given': "),
    "another model for a network": (
        lambda folder: [
            changed(folder, "explainer._target_", "explainers.shapley.Shapley"),
            changed(folder, "explainer.network", FASTSHAP | {"backbone": "hf-hub:a/b"}),
        ],
        "for explainer.network.backbone, got 'hf-hub:a/b': ",
    ),
    "a network of another explainer": (
        setting("network", FASTSHAP | {"backbone": "resnet18"}),
        "expected explainers.tve.LightNetwork or explainers.tve.PaperNetwork for explainer.network, got 'explainers.s",
    ),
    "an explainer without training": (
        setting("_target_", "explainers.posthoc.Occlusion"),
        "posthoc.Occlusion': " + REFUSED,
    ),
    "a base class": (
        setting("_target_", "explainers.training.NetworkExplainer"),
        "got 'explainers.training.NetworkExplainer': " + REFUSED,
    ),
    "a module of an explainer": (
        setting("_target_", "explainers.tve.tve.TVE"),
        "got 'explainers.tve.tve.TVE': " + REFUSED,
    ),
    "a name that a room does not export": (setting("_target_", "explainers.tve.torch"), "got 'explainers.tve.torch': "),
    "a room that is not there": (setting("_target_", "explainers.evil.TVE"), "got 'explainers.evil.TVE': " + REFUSED),
    "no explainer": (setting("_target_", None), "for explainer, got None: " + REFUSED),
    "a pickle as the checkpoint": (setting("target.model.checkpoint_path", "evil.pth"), "expected a .safetensors file"),
    "a pickle as the head": (setting("target.head", "evil.pth"), "for explainer.target.head, got 'evil.pth': "),
    "a pickle as pretrained weights": (
        setting("target.model.pretrained_cfg_overlay", {"file": "evil.pth"}),
        "for explainer.target.model.pretrained_cfg_overlay.file, got 'evil.pth': ",
    ),
    "pretrained weights of a stranger": (
        setting("target.model.pretrained_cfg_overlay", {"hf_hub_id": "user/model"}),
        "for explainer.target.model.pretrained_cfg_overlay, got ",
    ),
    "a setting of all models": (setting("target.model.scriptable", True), "model.scriptable, got 'scriptable': "),
    "a cache": (setting("target.model.cache_dir", "given"), "explainer.target.model.cache_dir, got 'cache_dir': "),
    "an unknown argument": (setting("no_such", 1), "settings that build an explainer, got TypeError: "),
    "an unknown model": (setting("target.model.model_name", "evil"), "settings that build an explainer, got RuntimeE"),
    "lines in a name": (setting("target._target_", "a\n\x1b[2Jb"), r"got 'a\n\x1b[2Jb': "),
    "a tag of YAML": (write(CONFIG, f"explainer: !!python/object/apply:os.mknod [{MADE}]"), "got a damaged file: "),
    "aliases": (write(CONFIG, BOMB), "config.yaml: expected the config of the run, got a damaged file: "),
    "an alias of itself": (write(CONFIG, "explainer: &a\n  target: *a\n"), "got a damaged file: "),
    "a deep config": (write(CONFIG, "[" * 100000), "got a damaged file: "),
    "a config of a list": (write(CONFIG, "- explainer"), "got a damaged file: "),
    "a config of nothing": (write(CONFIG, "explainer: {_target_: x}"), "expected settings of explainer.target, got no"),
    "a long config": (write(CONFIG, "#" * (1 << 18) + "#"), "got 262145 bytes: give another folder"),
    "bytes": (lambda folder: (folder / CONFIG).write_bytes(b"\xff\xfe"), "got bytes that are no text: "),
    "a config from outside": (link(CONFIG, "explainer: {}"), "config.yaml, got a link to "),
    "versions from outside": (link(VERSIONS, '{"password": 1}'), "versions.json, got a link to "),
    "long versions": (write(VERSIONS, "[" * (1 << 21)), "got 2097152 bytes: "),
    "deep versions": (write(VERSIONS, "[" * 100000), "versions.json: expected a dictionary, got a damaged file: "),
    "no versions": (write(VERSIONS, "no JSON"), "versions.json: expected a dictionary, got a damaged file: delete it"),
    "weights that are a pickle": (
        lambda folder: (folder / EXPLAINER).write_bytes(pickle.dumps(Program())),
        "explainer.safetensors, got a damaged file",
    ),
}


def of_other_weights(weights, metadata):
    """Weights that are not those of the config, with any identity."""
    return lambda folder: save_file(weights, folder / EXPLAINER, metadata)


HOSTILE |= {
    "weights of another shape": (of_other_weights({"x": torch.zeros(3)}, None), "to be trained for the model"),
    "an identity that is no JSON": (of_other_weights({}, {"identity": "{"}), "got a damaged file"),
    "an identity of a list": (of_other_weights({}, {"identity": "[1]"}), "got a damaged file"),
    "an identity of lists": (
        of_other_weights({}, {"identity": '{"target": [1]}'}),
        "settings that build an explainer, ",
    ),
    "a deep identity": (of_other_weights({}, {"identity": "[" * 100000}), "got a damaged file"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line_and_runs_nothing(change, message, folder):
    change(folder)
    before, modules = sorted(os.listdir(folder.parent)), {"subprocess", "hydra.utils"} | set(sys.modules)
    with pytest.raises(InputError) as caught:
        explainers.load(folder)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 700
    assert sorted(os.listdir(folder.parent)) == before and not Path(MADE).exists()
    assert {name for name in sys.modules.keys() - modules if "evil" in name} == set()


def test_the_example_with_torchrun_runs_nothing_without_weights_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / EXPLAINER).touch()
    explainer = {"_target_": "explainers.tve.TVE", "grid": {}, "network": {}, "target": TORCHRUN}
    (tmp_path / CONFIG).write_text(yaml.safe_dump({"explainer": explainer}))
    with pytest.raises(
        InputError, match=r"for explainer\.target, got 'explainers\.running\.processes\.torchrun': a config from"
    ):
        explainers.load(tmp_path)
    assert not Path(MADE).exists()


@pytest.mark.parametrize("explainer", ["tve", "tve_paper", "anyhead", "vit_shapley", "fastshap", "shapley_light"])
def test_every_run_of_our_own_configs_is_permitted(explainer, tmp_path):
    cfg = composed("target=tiny", f"explainers@explainer={explainer}", folder=tmp_path)
    settings = explainer_settings(OmegaConf.to_yaml(cfg, resolve=True), tmp_path)
    check_permitted(settings.pop("target"), "target", "explainer.target")
    kind = learned_explainer(settings.pop("_target_"))
    check_arguments(kind.settings_to_load(settings), kind.networks)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs/target").glob("*.yaml")))
def test_every_target_of_our_own_configs_is_permitted(name, tmp_path):
    settings = ["target.model.model_name=resnet18"] if name == "timm" else []  # the base of the others
    cfg = OmegaConf.to_container(composed(f"target={name}", *settings, folder=tmp_path), resolve=True)
    check_permitted(cfg["target"], "target", "target")
    check_permitted(cfg["grid"], "grid", "grid")


def test_an_honest_folder_is_loaded_from_the_cache_of_the_hub_too(folder, tmp_path):
    """There, all files are links to blobs."""
    expected = explainers.load(folder)(IMAGES)
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (tmp_path / "blobs" / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert torch.equal(explainers.load(snapshot)(IMAGES), expected)


def test_weights_that_timm_reads_from_a_file_may_be_named(folder):
    file = OmegaConf.load(folder / CONFIG).explainer.target.model.checkpoint_path
    expected = explainers.load(folder).identity()
    model = {"checkpoint_path": "", "pretrained": True, "pretrained_cfg_overlay": {"file": file}}
    for name, value in model.items():
        changed(folder, f"explainer.target.model.{name}", value)
    assert explainers.load(folder).identity() == expected


def test_what_is_of_the_users_own_is_built_when_the_user_says_so(folder):
    expected = explainers.load(folder)(IMAGES)
    changed(folder, "explainer.network._target_", f"{OwnNetwork.__module__}.OwnNetwork")
    with pytest.raises(
        InputError, match=r"got 'test_hostile_folders\.OwnNetwork': .*trust_config=True builds it anyway"
    ):
        explainers.load(folder)
    with pytest.raises(InputError, match="network.class: LightNetwork → OwnNetwork"):
        explainers.load(folder, trust_config=True)  # its weights belong to another network, so it was built
    changed(folder, "explainer.network._target_", "explainers.tve.light_network.LightNetwork")
    assert torch.equal(explainers.load(folder, trust_config=True)(IMAGES), expected)
    changed(folder, "explainer.network._target_", "no_such.Network")
    with pytest.raises(InputError, match=r"^expected something to build, got no_such\.Network: No module named"):
        explainers.load(folder, trust_config=True)


def test_a_target_of_the_users_own_can_be_given_without_trust(folder):
    loaded = explainers.load(folder)
    changed(folder, "explainer.target", {"_target_": "own.Target"})
    assert torch.equal(explainers.load(folder, target=loaded.target)(IMAGES), loaded(IMAGES))
