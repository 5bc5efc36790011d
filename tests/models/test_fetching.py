"""Models of timm by name: weights from files and from the cache, and no connection unless one is needed."""

import shutil

import huggingface_hub
import pytest
import timm
import torch
from hub import cache_place, cache_weights
from safetensors.torch import save_file

from explainers.errors import InputError
from explainers.models import TargetModel, as_target
from explainers.models.fetching import create_model, load_target, pretrained_file, save_target, timm_model
from explainers.models.heads import ProjectedHead, load_head
from explainers.models.names import class_index, class_names, read_names, readable_names

NAME = "test_vit2"


@pytest.fixture(autouse=True)
def no_sockets(no_sockets, tmp_path, monkeypatch):
    """Only the cache in `tmp_path` is searched."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))


def model(name=NAME, **settings):
    return timm.create_model(name, **settings)


def same(first, second):
    weights = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in weights)


@pytest.mark.parametrize(("classes", "suffix"), [(1000, "pth"), (5, "safetensors"), (0, "pth")])
def test_a_file_decides_the_number_of_classes(suffix, classes, tmp_path):
    own, file = model(num_classes=classes), tmp_path / f"weights.{suffix}"
    save_file(own.state_dict(), file) if suffix == "safetensors" else torch.save({"state_dict": own.state_dict()}, file)
    loaded = timm_model(NAME, file)
    assert same(loaded, own) and loaded.num_classes == classes and not loaded.training


@pytest.mark.slow
def test_a_name_without_a_tag_has_the_normalisation_of_timms_default(tmp_path):
    save_file(model("vit_tiny_patch16_224").state_dict(), tmp_path / "weights.safetensors")
    target = TargetModel(timm_model("vit_tiny_patch16_224", tmp_path / "weights.safetensors"))
    assert target.mean.unique().tolist() == target.std.unique().tolist() == [0.5]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_the_cache_need_no_connection(file, tmp_path):
    own = model()
    cache_weights(own.state_dict(), tmp_path / "hub", NAME, file)
    assert same(timm_model(NAME), own)
    assert same(create_model(NAME, pretrained=True), own)


def test_weights_that_timm_names_by_an_address_are_looked_up_in_torchs_cache(tmp_path):
    file = timm.models.get_pretrained_cfg("gcvit_xxtiny").url.rpartition("/")[2]
    (tmp_path / "torch/checkpoints").mkdir(parents=True)
    (tmp_path / "torch/checkpoints" / file).touch()
    assert pretrained_file("gcvit_xxtiny") == tmp_path / "torch/checkpoints" / file


def test_a_download_is_announced(tmp_path, monkeypatch, capsys):
    save_file(model().state_dict(), tmp_path / "downloaded.safetensors")
    size = type("Metadata", (), {"size": 1_500_000})
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda address: size)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *of: str(tmp_path / "downloaded.safetensors"))
    timm_model(NAME)
    assert capsys.readouterr().err == (
        "downloading the weights of test_vit2 (1.5 MB) from huggingface.co/timm/test_vit2.r160_in1k\n"
    )


def given(tmp_path, content):
    """A file with what is no weights of the model."""
    file = tmp_path / ("text.safetensors" if content == "text" else f"{content}.pth")
    stored = {
        "other": lambda: model("test_resnet").state_dict(),
        "wider": lambda: {name: torch.cat([each, each]) for name, each in model().state_dict().items()},
        "program": model,
        "text": lambda: "hello",
    }
    torch.save(stored[content](), file) if content in stored else None
    return file


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("test_vit22", "absent", "test_vit22: did you mean test_vit2"),
        ("test_vit2.augreg", "absent", "did you mean test_vit2.r160_in1k"),
        (NAME, None, "weights=FILE"),
        ("test_vit4", None, "weights=FILE"),  # timm has none
        ("gcvit_tiny", None, "github.com"),
        (NAME, "absent", "absent.pth"),
        (NAME, "other", "it lacks"),
        (NAME, "wider", "has the shape [2, "),
        (NAME, "program", "a damaged file, or one that holds programs"),
        (NAME, "text", "a damaged file"),
        (NAME, "https://example.org/weights.pth", "address"),
        (NAME, "notes.md", "notes.md"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused(name, content, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").touch()
    file = content if content is None or "." in content else given(tmp_path, content)
    with pytest.raises(InputError) as refused:
        timm_model(name, file)
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.situation(19)
@pytest.mark.situation(20)
@pytest.mark.parametrize(
    ("prefix", "suffix"), [("model.", "ckpt"), ("module._orig_mod.", "ckpt"), ("net.encoder.", "safetensors")]
)
def test_the_prefix_of_what_held_the_model_is_taken_off_and_said(prefix, suffix, tmp_path, capsys):
    own, file = model(num_classes=3), tmp_path / f"weights.{suffix}"
    held = {f"{prefix}{name}": value for name, value in own.state_dict().items()} | {"loss.weight": torch.ones(2)}
    lightning = {"state_dict": held, "hyper_parameters": {"lr": 1e-3}, "epoch": 3}
    save_file(held, file) if suffix == "safetensors" else torch.save(lightning, file)
    loaded = timm_model(NAME, file)
    assert same(loaded, own) and loaded.num_classes == 3 and "state_dict" not in loaded.pretrained_cfg
    assert same(create_model(NAME, num_classes=3, checkpoint_path=str(file)), own)
    below = "" if prefix == "module._orig_mod." else f" below {prefix}"  # timm takes these off
    said = f"{file}: {len(own.state_dict())} weights{below}, without loss.weight\n"
    assert capsys.readouterr().err == said * 2


HOLDERS = {
    "weights.pth.tar": lambda own: {"epoch": 3, "state_dict": {f"module.{name}": own[name] for name in own}},
    "weights.pkl": lambda own: own,
    "model_state_dict.pt": lambda own: {"epoch": torch.tensor(3), "model_state_dict": own},
    "net.pth": lambda own: {"net": own, "optimizer": {"state": {0: dict.fromkeys("abc", torch.ones(1))}}},
    "net.model.pt": lambda own: {"net": {"model": own}, "acc": 0.9},
    "network, not those of ema_network.pt": lambda own: {"network": own, "ema_network": own},
    "ema.pt": lambda own: {"model": {name: 0 * own[name] for name in own}, "model_ema": own},
}


@pytest.mark.parametrize("name", HOLDERS)
def test_weights_are_found_in_what_holds_them(name, tmp_path, capsys):
    own, file = model(num_classes=3), tmp_path / name
    torch.save(HOLDERS[name](own.state_dict()), file)
    loaded = timm_model(NAME, file)
    assert same(loaded, own) and loaded.num_classes == 3
    assert same(create_model(NAME, num_classes=3, checkpoint_path=str(file)), own)
    said = f"{file}: the weights are those of {name.rpartition('.')[0]}\n" * 2
    assert capsys.readouterr().err == ("" if name in ("weights.pth.tar", "weights.pkl", "ema.pt") else said)


@pytest.mark.situation(18)
def test_a_folder_and_a_repository_of_the_cache_are_models_as_in_timm(tmp_path, capsys):
    own = timm.create_model("test_vit", num_classes=2)
    timm.models.save_for_hf(own, tmp_path / "mine", model_config={"label_names": ["cat", "red_fox"]})
    for name in (f"local-dir:{tmp_path / 'mine'}", "hf-hub:user/mine"):
        if name.startswith("hf-hub"):
            shutil.copytree(tmp_path / "mine", cache_place(tmp_path / "hub", "user/mine"), dirs_exist_ok=True)
        loaded = timm_model(name)
        assert same(loaded, own) and loaded.num_classes == 2 and not loaded.training
        assert class_names(TargetModel(loaded)) == ["cat", "red fox"]
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), tmp_path / "other.safetensors")
    assert timm_model(f"local-dir:{tmp_path / 'mine'}", tmp_path / "other.safetensors").num_classes == 3
    for name, told in (("hf-hub:user/none", "huggingface.co, got no download"), ("local-dir:none", "config.json")):
        with pytest.raises(InputError, match=told):
            timm_model(name)


def test_a_linear_head_of_a_timm_model_is_saved_and_no_other(make_model, images, tmp_path):
    target, file = TargetModel(make_model(), torch.nn.Linear(24, 3, bias=False)).eval(), tmp_path / "target.safetensors"
    save_target(target, file)
    torch.testing.assert_close(load_target(target, file)(images), target(images))
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    for other in (TargetModel(target, ProjectedHead(torch.eye(24))), as_target(net, mean=0.5, std=0.5, image_size=32)):
        with pytest.raises(InputError, match="^expected a model of timm with a linear head to write to"):
            save_target(other, file)


def test_weights_of_another_pooling_say_so(tmp_path):
    save_file(timm.create_model("test_vit", global_pool="avg").state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match=r"lacks norm.weight, norm.bias \(weights with fc_norm belong to .*'avg'"):
        timm_model("test_vit", tmp_path / "weights.safetensors")


NAMES = (
    "cat\nred fox\n",
    "\ufeffcat\r\nred fox\r\n\r\n \n",
    '["cat", "red fox"]',
    '\ufeff{"0": "cat", "1": "red fox"}',
    '{"red fox": 1, "cat": 0}',
    '{"0": ["n02123045", "cat"], "1": ["n02119022", "red fox"]}',
    '{"model_type": "vit", "id2label": {"1": "red fox", "0": "cat"}, "label2id": {}}',
    '{"class_to_idx": {"red fox": 1, "cat": 0}}',
)


def test_names_of_classes_come_from_a_file(tmp_path):
    for content in NAMES:
        file = tmp_path / ("names.json" if content.lstrip("\ufeff")[0] in "[{" else "names.txt")
        file.write_text(content, encoding="utf-8")
        assert read_names(file) == ["cat", "red fox"], content
    assert as_target(model(num_classes=2), classes=file).classes == ["cat", "red fox"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("names.json", '{"1": "cat"}'),  # its indices are not 0 to 0
        ("names.json", '{"cat": 1, "dog": 1}'),
        ("names.json", '["cat"]'),
        ("names.json", '{"cat": [1]}'),
        ("names.json", "[[1], 2]"),
        ("names.json", "3"),
        ("names.csv", "index,name\n0,cat\n1,dog"),
        ("names.txt", "cat\n\nred fox\n"),
    ],
)
def test_files_without_a_name_for_each_class_are_refused(file, content, tmp_path):
    (tmp_path / file).write_text(content)
    with pytest.raises(InputError, match="class_names|names"):
        as_target(model(num_classes=2), classes=tmp_path / file)


@pytest.mark.parametrize(("wnid", "index"), [("n02123045", 0), ("n02012849", 2), ("n03126707", 1)])
def test_a_class_is_also_named_by_its_wnid(wnid, index):
    names = readable_names(["n02123045", "n03126707", "n02012849"])  # a tabby, and the two cranes
    assert class_index(wnid, names) == index
    with pytest.raises(InputError, match="^classes=n01440764: expected one of .* 3 classes: name it by its index"):
        class_index("n01440764", names)


@pytest.mark.parametrize(
    ("dtype", "suffix"), [(torch.int8, "safetensors"), (torch.bool, "pth"), (torch.complex64, "safetensors")]
)
def test_weights_that_are_not_floating_point_are_refused(dtype, suffix, tmp_path):
    weights, file = model(num_classes=3).state_dict(), tmp_path / f"weights.{suffix}"
    weights["head.weight"] = weights["head.weight"].to(dtype)
    save_file(weights, file) if suffix == "safetensors" else torch.save(weights, file)
    with pytest.raises(InputError, match=r"^expected floating-point weights in .*, got \w+ for head.weight: give the"):
        timm_model(NAME, file)
    head = {"weight": weights["head.weight"], "bias": weights["head.bias"]}
    save_file(head, tmp_path / "head.safetensors")
    with pytest.raises(InputError, match=r"^.*/head.safetensors: expected floats .* for 'weight', got "):
        load_head(tmp_path / "head.safetensors")
