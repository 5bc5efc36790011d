"""Files from elsewhere: `explainers.load` builds what it knows, and refuses everything else in one line."""

import json
import os
import pickle
import struct
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import timm_model, wake
from safetensors.torch import load_file, save_file

import explainers
from explainers.errors import InputError
from explainers.saved.weights import read_header
from explainers.share import pretrained
from explainers.tve import TVE, LightNetwork

IMAGES = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
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
def target():
    return timm_model(as_target=True)


@pytest.fixture
def folder(target, tmp_path, monkeypatch):
    """The folder of an explainer, to change. What is loaded must run, make or ask for nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "snapshot_download", lambda *args, **kwargs: pytest.fail("the Hub was asked"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    explainer = TVE(target, target.grid, partial(LightNetwork, blocks=[0, 1], width=8), pooling=3)
    wake(explainer.network)
    explainer.export(tmp_path / "given")
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Program()))
    return tmp_path / "given"


def header(**changes):
    """A change of the header; keys are dotted, with __ for a dot."""

    def change(folder):
        identity = read_header(folder / EXPLAINER)
        for key, value in changes.items():
            *parents, last = key.split("__")
            node = identity
            for name in parents:
                node = node[name]
            node[last] = value
        save_file(load_file(folder / EXPLAINER), folder / EXPLAINER, {"identity": json.dumps(identity)})

    return change


def kind(name):
    """A change of the class."""
    return header(**{"class": name})


def weights(change, metadata=None):
    """A change of the tensors."""

    def rewrite(folder):
        identity = {"identity": json.dumps(read_header(folder / EXPLAINER))} if metadata is None else metadata
        save_file(change(load_file(folder / EXPLAINER)), folder / EXPLAINER, identity)

    return rewrite


def content(data):
    return lambda folder: (folder / EXPLAINER).write_bytes(data)


def link(name, text=None):
    """A file outside the folder, to which the folder links."""

    def change(folder):
        private = folder.parent / "private.safetensors"
        private.write_bytes((folder / name).read_bytes() if text is None else text.encode())
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(private)

    return change


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


TOUCH = {"_target_": "subprocess.check_call", "_args_": [["touch", MADE]]}
LONG = struct.pack("<Q", 2**21) + b"{" + b" " * (2**21 - 2) + b"}"
HUGE = struct.pack("<Q", 2**63) + b"{}"
HOSTILE = {
    "a program as the class": (kind("subprocess.check_call"), "as the class in given/"),
    "a dotted class of ours": (kind("explainers.tve.TVE"), "got 'explainers.tve.TVE'"),
    "a method as the class": (kind("Occlusion"), "expected one of AnyHead, SelfExplaining, Sha"),
    "a dictionary as the class": (kind(TOUCH), "got {'_target_'"),
    "no class": (kind(None), "got None: give another file"),
    "another explainer of ours": (
        kind("AnyHead"),
        "expected settings blend, refine, refine_removal, temperature, got 'h_weight'",
    ),
    "a model that explains itself": (kind("SelfExplaining"), "model.safetensors of a self-explaining"),
    "a program as the network": (header(network__class="torch.load"), "got 'torch.load': give your own network"),
    "a network of another explainer": (header(network__class="FastSHAPNetwork"), "expected LightNetwork or PaperNetw"),
    "a network without a class": (header(network={}), "as the network in given/explainer.safetensors, got None"),
    "a list as the network": (header(network=[1]), "given/explainer.safetensors: network: expected settings, got [1]"),
    "a program in the network": (header(network__hops=TOUCH), "a number or a word for 'hops', got {'_target_'"),
    "a program in a list": (header(network__hops=[[TOUCH]]), "expected a number or a word for 'hops', got [{"),
    "a path in the network": (header(network__width="../evil.pth"), "for 'width', got '../evil.pth'"),
    "initial weights of the network": (
        header(network={"class": "PaperNetwork", "mae": "evil.pth"}),
        "got 'mae': give another file",
    ),
    "an unknown setting of the network": (header(network__no_such=1), "got 'no_such': give another file"),
    "another width": (header(network__width=16), "its weights do not fit its settings"),
    "a width that fills the memory": (header(network__width=10**12), "for 'width', got 1000000000000"),
    "a network that fills the memory": (
        header(network={"class": "PaperNetwork", "width": 4096, "heads": 1, "depth": 64}),
        "its weights do not fit its settings",
    ),
    "a program as the grid": (header(grid=TOUCH), "expected a number or a word for '_args_', got ['touch', 'MADE']"),
    "a list as the grid": (header(grid=[32, 8]), "given/explainer.safetensors: grid: expected settings, got [32, 8]"),
    "an impossible grid": (header(grid__patch_size=7), "image_size 32 is not a multiple of patch_size 7"),
    "an unknown setting of the grid": (header(grid__no_such=1), "settings of an explainer, got TypeError"),
    "weights in the header": (header(weights="evil.pth"), "got 'weights': give another file"),
    "a surrogate in the header": (header(surrogate="evil.pth"), "got 'surrogate': give another file"),
    "a way around the identity": (header(allow_finetuned_backbone=True), "got 'allow_finetuned_backbone'"),
    "a way around it when read": (header(reading__allow_finetuned_backbone=True), "got 'allow_finetuned_backbone'"),
    "another target when read": (header(reading__target="x"), "got 'target': give another file"),
    "a program when read": (header(reading__pooling=TOUCH), "for 'pooling', got {'_target_'"),
    "a wrong word when read": (header(reading__score="evil"), "expected score log_probability or logit, got evil"),
    "NaN when read": (header(reading__h_weight=float("nan")), "for 'h_weight', got nan"),
    "a list when read": (header(reading=[1]), "reading: expected settings, got [1]: give another file"),
    "lines in a name": (kind("a\n\x1b[2Jb"), r"got 'a\n\x1b[2Jb'"),
    "another backbone": (header(target__backbone_sha256="0" * 64, sketch=[1.0]), "was trained on other weights"),
    "a target of lists": (header(target=[1]), "settings of an explainer, got AttributeError"),
    "a list as the identity": (weights(dict, {"identity": "[1]"}), "got a damaged file"),
    "an identity that is no JSON": (weights(dict, {"identity": "{"}), "got a damaged file"),
    "a deep identity": (weights(dict, {"identity": "[" * 100000}), "got a damaged file"),
    "an identity of another file": (weights(dict, {}), "as the class in given/explainer.safetensors, got None"),
    "tensors of another shape": (weights(lambda all: all | {"mean_g": torch.zeros(3)}), "got (3,)"),
    "one tensor too few": (weights(lambda all: {k: v for k, v in all.items() if k != "mean_g"}), "got nothing"),
    "one tensor too many": (weights(lambda all: all | {"a\nb": torch.zeros(3)}), r"expected nothing for a\nb in "),
    "tensors of NaN": (weights(lambda all: all | {"mean_g": all["mean_g"] * torch.nan}), "NaN or infinity in mean_g"),
    "integers": (
        weights(lambda all: all | {"write.bias": all["write.bias"].int()}),
        "expected floating-point weights in given/explainer.safetensors, got int32 for write.bias",
    ),
    "a pickle": (content(pickle.dumps(Program())), "explainer.safetensors, got a damaged file"),
    "an empty file": (content(b""), "explainer.safetensors, got a damaged file"),
    "a long header": (content(LONG), "explainer.safetensors, got a damaged file"),
    "a header of 8 exabytes": (content(HUGE), "explainer.safetensors, got a damaged file"),
}
BESIDE = {
    "weights from outside": (link(EXPLAINER), "expected a file at given/explainer.safetensors, got a link to "),
    "a config from outside": (link("config.yaml", "a: b"), "at given/config.yaml, got a link to "),
    "versions from outside": (link("versions.json", "{}"), "at given/versions.json, got a link to "),
    "a long config": (write("config.yaml", "#" * (1 << 18) + "#"), "got 262145 bytes: delete it"),
    "a config of bytes": (lambda folder: (folder / "config.yaml").write_bytes(b"\xff\xfe"), "bytes that are no text"),
    "no file": (lambda folder: (folder / EXPLAINER).unlink(), "got no explainer.safetensors or model.safetensors"),
    "a folder as the file": (
        lambda folder: [(folder / EXPLAINER).unlink(), (folder / EXPLAINER).mkdir()],
        "no trained explainer at given/explainer.safetensors",
    ),
}


def refused(source, target, message):
    """Nothing is run, made or imported."""
    before, modules = sorted(os.listdir(".")), set(sys.modules)
    with pytest.raises(InputError) as caught:
        explainers.load(source, target)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 700
    assert sorted(os.listdir(".")) == before and not Path(MADE).exists()
    assert not {name for name in sys.modules.keys() - modules if "evil" in name or name == "hydra.utils"}


@pytest.mark.parametrize("name", [*HOSTILE, *BESIDE])
def test_a_hostile_folder_or_file_is_refused_in_one_line_and_runs_nothing(name, folder, target):
    change, message = (HOSTILE | BESIDE)[name]
    change(folder)
    for source in (Path("given"), Path("given") / EXPLAINER)[: 1 + (name in HOSTILE)]:
        refused(source, target, message)


@pytest.mark.parametrize(
    "name", ["hf-hub:user/model", "local-dir:given", "evil", "a\nb", "../evil", None, ["resnet18"], TOUCH]
)
def test_a_model_that_timm_does_not_know_is_not_looked_for(name, folder):
    header(model=name)(folder)
    refused(Path("given"), None, "expected the name of a model of timm in given/explainer.safetensors, got ")


def test_a_model_whose_weights_are_not_here_is_asked_for(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=r"whose weights are not here: give the model, as in load\(\.\.\., target="):
        explainers.load(folder)


def test_a_file_is_loaded_by_itself_from_its_folder_and_from_the_cache_of_the_hub(folder, target, tmp_path):
    """In the cache, all files are links to blobs."""
    expected = explainers.load(folder, target)(IMAGES)
    assert torch.equal(explainers.load(folder / EXPLAINER, target)(IMAGES), expected)
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs" / EXPLAINER).write_bytes((folder / EXPLAINER).read_bytes())
    (snapshot / EXPLAINER).symlink_to(Path("../../blobs") / EXPLAINER)
    assert torch.equal(explainers.load(snapshot, target)(IMAGES), expected)


def test_what_lies_beside_the_weights_is_not_read(folder, target):
    expected = explainers.load(folder, target)(IMAGES)
    (folder / "config.yaml").write_text(f"explainer: !!python/object/apply:os.mknod [{MADE}]")
    (folder / "versions.json").write_text("[" * 100000)
    loaded = explainers.load(folder, target)
    assert torch.equal(loaded(IMAGES), expected) and loaded.record.keys() == {"config.yaml", "versions.json"}
    loaded.save_pretrained(folder.parent / "saved")
    assert not Path(MADE).exists() and (folder.parent / "saved/README.md").is_file()


def test_a_network_of_the_users_own_is_given_in_python(folder, target):
    expected = explainers.load(folder, target)(IMAGES)
    header(network__class="OwnNetwork")(folder)
    refused(folder, target, "got 'OwnNetwork': give your own network, as in load(..., network=MyNetwork)")
    assert torch.equal(explainers.load(folder, target, network=OwnNetwork)(IMAGES), expected)
    with pytest.raises(InputError, match="network.class: OwnNetwork → LightNetwork"):
        explainers.load(folder, target, network=LightNetwork)
