"""Files from elsewhere: `explainers.load` builds what it knows, and refuses everything else in one line."""

import copy
import json
import os
import pickle
import shutil
import struct
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import timm_model, wake
from safetensors.torch import load_file, save_file
from torch import nn

import explainers
from explainers import posthoc
from explainers.auditing.store import EvidenceStore, Source
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.heads import ProjectedHead, save_head
from explainers.saved.weights import read_header, read_tensors
from explainers.share import pretrained
from explainers.tve import TVE, LightNetwork
from explainers.vectors import exported_target
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex
from explainers.vectors.self_explaining import SelfExplaining
from explainers.vectors.vector_files import save_vector

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
    return timm_model(depth=1, as_target=True)


@pytest.fixture(scope="module")
def given(target, tmp_path_factory):
    """The folder of an explainer."""
    explainer = TVE(target, target.grid, partial(LightNetwork, blocks=[0], width=8), pooling=3)
    wake(explainer.network)
    return explainer.export(tmp_path_factory.mktemp("given")).parent


@pytest.fixture
def folder(given, tmp_path, monkeypatch):
    """A copy of it, to change. What is loaded must run, make or ask for nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "snapshot_download", lambda *args, **kwargs: pytest.fail("the Hub was asked"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Program()))
    return shutil.copytree(given, tmp_path / "given")


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


HEAVY = {"class": "PaperNetwork", "encoder": {"width": 4096, "heads": 1, "depth": 64}}
TOUCH = {"_target_": "subprocess.check_call", "_args_": [["touch", MADE]]}
LONG = struct.pack("<Q", 2**21) + b"{" + b" " * (2**21 - 2) + b"}"
HUGE = struct.pack("<Q", 2**63) + b"{}"
HOSTILE = {
    "a program as the class": (kind("subprocess.check_call"), "expected one of AnyHead, "),
    "a dotted class of ours": (kind("explainers.tve.TVE"), "got 'explainers.tve.TVE'"),
    "a method as the class": (kind("Occlusion"), "expected one of AnyHead, SelfExplaining, Sha"),
    "a dictionary as the class": (kind(TOUCH), "got {'_target_'"),
    "another explainer of ours": (kind("AnyHead"), "got 'h_weight'"),
    "a model that explains itself": (kind("SelfExplaining"), "expected texts for classes, got None"),
    "a program as the network": (header(network__class="torch.load"), "got 'torch.load': give your own network"),
    "a network of another explainer": (header(network__class="FastSHAPNetwork"), "expected LightNetwork or PaperNetw"),
    "unknown sizes of the network": (header(network={"class": "PaperNetwork", "encoder": {"x": 1}}), "got KeyError"),
    "a program as sizes": (header(network={"class": "PaperNetwork", "encoder": TOUCH}), "for 'encoder', got {'_tar"),
    "a list as the network": (header(network=[1]), "given/explainer.safetensors: network: expected settings, got [1]"),
    "a program in the network": (header(network__hops=TOUCH), "a number or a word for 'hops', got {'_target_'"),
    "a path in the network": (header(network__width="../evil.pth"), "for 'width', got '../evil.pth'"),
    "initial weights of the network": (header(network={"class": "PaperNetwork", "mae": "evil.pth"}), "got 'mae'"),
    "an unknown setting of the network": (header(network__no_such=1), "got 'no_such': give another file"),
    "another width": (header(network__width=16), "for 'position', got F32 of shape [16, 8]"),
    "a network that fills the memory": (header(network=HEAVY), "got nothing: give another file"),
    "a program as the grid": (header(grid=TOUCH), "expected a number or a word for '_args_', got ['touch', 'MADE']"),
    "an impossible grid": (header(grid__patch_size=7), "image_size 32 is not a multiple of patch_size 7"),
    "an unknown setting of the grid": (header(grid__no_such=1), "settings of an explainer, got TypeError"),
    "weights in the header": (header(weights="evil.pth"), "got 'weights': give another file"),
    "a way around the identity": (header(allow_finetuned_backbone=True), "got 'allow_finetuned_backbone'"),
    "a way around it when read": (header(reading__allow_finetuned_backbone=True), "got 'allow_finetuned_backbone'"),
    "another target when read": (header(reading__target="x"), "got 'target': give another file"),
    "a program when read": (header(reading__pooling=TOUCH), "for 'pooling', got {'_target_'"),
    "NaN when read": (header(reading__h_weight=float("nan")), "for 'h_weight', got nan"),
    "lines in a name": (kind("a\n\x1b[2Jb"), r"got 'a\n\x1b[2Jb'"),
    "another backbone": (header(target__backbone_sha256="0" * 64, sketch=[1.0]), "was trained on other weights"),
    "an identity that is no JSON": (weights(dict, {"identity": "{"}), "got a damaged file"),
    "a pickle": (
        content(pickle.dumps(Program())),
        "explainer.safetensors: expected a trained explainer",
    ),
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
        "given/explainer.safetensors: expected a trained explainer, got no file",
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


WHOLE = {}
"""Kind of file → a whole one, the tensor that mutations change, and what opens it for a model."""


def make_explainer(target, folder):
    explainer = TVE(target, target.grid, partial(LightNetwork, blocks=[0], width=8), pooling=3)
    return explainer.export(folder), "mean_g", lambda path, model: explainers.load(path, model)


def make_self_explaining(target, folder):
    module = SelfExplaining(target, target.grid)
    module.target.classes = ["a", "b", "c"]
    module.target.head = FixedHead(simplex(3, 24), reading="blank_patch", patch_scale=0.3, blocks=(0,))
    with torch.no_grad():
        module.target.backbone.norm.weight += torch.linspace(-0.1, 0.1, 24)
    return module.export(folder, alpha=0.5), "head.weight", lambda path, model: exported_target(model, path)


def make_vector(target, folder):
    trained = make_self_explaining(target, folder)[0]
    path = save_vector(trained, target, folder / "vector.safetensors", 0.5)
    return path, "norm.weight.values", lambda path, model: explainers.add_vector(model, vector=path)


def make_head(target, folder):
    path = save_head(nn.Linear(24, 3), folder / "head.safetensors", target.backbone_identity(), ["a", "b", "c"])
    return path, "weight", lambda path, model: TargetModel(model, path)


def make_cosine_head(target, folder):
    head = ProjectedHead(simplex(3, 12), torch.randn(12, 24), scale=4.0, bias=torch.zeros(3))
    path = save_head(head, folder / "head.safetensors", target.backbone_identity(), [])
    return path, "projection", lambda path, model: TargetModel(model, path)


def make_evidence(target, folder):
    def open_evidence(path, model):
        source = Source(["a", "b"], [0, 1], [], lambda part: [(IMAGES[list(part)], list(part))])
        EvidenceStore(path.parents[1], 1).collect(posthoc.PathFlow(model, model.grid), source)
        return EvidenceStore(path.parents[1]).identity()

    path = folder / "evidence/00001.safetensors"
    open_evidence(path, target)
    return path, "vectors", open_evidence


KINDS = {
    "explainer": make_explainer,
    "self-explaining model": make_self_explaining,
    "vector": make_vector,
    "head": make_head,
    "cosine head": make_cosine_head,
    "evidence": make_evidence,
}


@pytest.fixture
def whole(request, target, tmp_path_factory, tmp_path):
    """A copy of a whole file to change, see `WHOLE`."""
    kind = request.param
    if kind not in WHOLE:
        WHOLE[kind] = KINDS[kind](target, tmp_path_factory.mktemp(kind.replace(" ", "_")))
    path, name, opens = WHOLE[kind]
    inside = path.relative_to(path.parents[1])
    shutil.copytree(path.parent, (tmp_path / inside).parent)
    return kind, tmp_path / inside, name, opens


def of_tensor(change):
    """A mutation of one tensor."""
    return lambda header, tensors, name: (header, tensors | {name: change(tensors[name])})


MUTATIONS = {
    "missing": lambda header, tensors, name: (header, {key: value for key, value in tensors.items() if key != name}),
    "extra": lambda header, tensors, name: (header, tensors | {"a\nb": torch.zeros(3)}),
    "no tensors": lambda header, tensors, name: (header, {}),
    "NaN": of_tensor(lambda value: value * torch.nan),
    "infinite": of_tensor(lambda value: value + torch.inf),
    "integers": of_tensor(lambda value: value.int()),
    "complex": of_tensor(lambda value: value.to(torch.complex64)),
    "a row less": of_tensor(lambda value: value[1:].clone()),
    "a dimension more": of_tensor(lambda value: value[None]),
    "a single number": of_tensor(lambda value: value.flatten()[0].clone()),
    "no numbers": of_tensor(lambda value: value[:0].clone()),
    "other values": of_tensor(lambda value: value + 1),
    "no header": lambda header, tensors, name: (None, tensors),
    "a list as the header": lambda header, tensors, name: ([1], tensors),
    "no target": lambda header, tensors, name: (header | {"target": [1], "head": None}, tensors),
    "another model in the header": lambda header, tensors, name: (
        header
        | {"target": header["target"] | dict.fromkeys(("architecture_sha256", "backbone_sha256"), "0" * 64)}
        | {key: "0" * 64 for key in ("architecture_sha256",) if key in header},
        tensors,
    ),
}
BYTES = {
    "truncated": lambda data: data[:-5],
    "truncated in the header": lambda data: data[:50],
    "empty": lambda data: b"",
    "a pickle": lambda data: pickle.dumps(Program()),
    "a long header": lambda data: LONG,
    "a header of 8 exabytes": lambda data: HUGE,
    "a deep header": lambda data: struct.pack("<Q", 200000) + b"[" * 200000,
    "a flipped bit": lambda data: data[:-7] + bytes([data[-7] ^ 64]) + data[-6:],
}
ALLOWED = {
    *((kind, change) for kind in KINDS if kind != "evidence" for change in ("other values", "a flipped bit")),
    *((kind, "no header") for kind in ("head", "cosine head")),
}
"""What cannot be told from another whole file."""

OPENED = {
    "explainer": {"model", "sketch"},
    "self-explaining model": {"model", "grid", "classes", "blocks", "normalise"},
    "vector": {"model", "grid", "target", "lambda_2", "blocks"},
    "head": {"target", "classes"},
    "cosine head": {"target", "classes"},
    "evidence": {"files"},  # which are none, as [] says, too
}
"""Keys of headers of which another value is as good, such as no names of classes, or of no use."""


def mutate(path, name, mutation):
    if mutation in BYTES:
        path.write_bytes(BYTES[mutation](path.read_bytes()))
        return
    header, tensors = MUTATIONS[mutation](*read_tensors(path), name)
    save_file(tensors, path, None if header is None else {"identity": json.dumps(header)})


def is_refused(path, opens, model):
    """The line with which a file is refused; none if it is opened."""
    try:
        opens(path, model)
    except InputError as error:
        line = str(error)
        assert str(path) in line or str(path.parents[1]) in line, line
        assert len(line.splitlines()) == 1 and len(line) < 900, line
        return line


@pytest.mark.parametrize("mutation", [*MUTATIONS, *BYTES])
@pytest.mark.parametrize("whole", KINDS, indirect=True)
def test_a_file_of_any_kind_that_was_changed_is_refused_in_one_line(whole, mutation, target, capsys):
    kind, path, name, opens = whole
    mutate(path, name, mutation)
    line = is_refused(path, opens, target)
    print(f"| {kind} | {mutation} | {line} |")
    assert (line is None) == ((kind, mutation) in ALLOWED)


@pytest.mark.parametrize("whole", KINDS, indirect=True)
def test_a_file_of_any_kind_is_refused_for_another_model_and_as_another_kind(whole, target):
    kind, path, _, opens = whole
    assert is_refused(path, opens, target) is None
    other_model = timm_model(seed=9, depth=1, as_target=True)
    assert (is_refused(path, opens, other_model) is None) == (kind == "self-explaining model")  # it has its own weights
    before = path.read_bytes()
    for other in {*WHOLE} - {kind, "self-explaining model"}:
        path.write_bytes(WHOLE[other][0].read_bytes())
        assert is_refused(path, opens, target) or {kind, other} == {"head", "cosine head"}
    path.write_bytes(before)


@pytest.mark.parametrize("whole", KINDS, indirect=True)
def test_a_header_with_any_other_value_is_refused_in_one_line_or_opened(whole, target):
    """None of these ends in a traceback; what is opened says nothing that is used."""
    kind, path, _, opens = whole
    header, tensors = read_tensors(path)
    opened = set()
    for keys in [(key,) for key in header] + [("head", key) for key in header.get("head", ())]:
        for value in (None, float("nan"), 10**400, "evil", [[1]], {"a": 1}):
            changed = copy.deepcopy(header)
            (changed if len(keys) == 1 else changed["head"])[keys[-1]] = value
            save_file(tensors, path, {"identity": json.dumps(changed)})
            if not is_refused(path, opens, target):
                opened.add(keys[-1])
    assert opened <= OPENED[kind]


@pytest.mark.parametrize(
    "name", ["hf-hub:user/model", "local-dir:given", "evil", "a\nb", "../evil", None, ["resnet18"], TOUCH]
)
def test_a_model_that_timm_does_not_know_is_not_looked_for(name, folder):
    header(model=name)(folder)
    refused(Path("given"), None, "given/explainer.safetensors: expected the name of a model of timm, got ")


def test_a_model_whose_weights_are_not_here_is_asked_for(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=r"whose weights are not here: give the model as target="):
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
