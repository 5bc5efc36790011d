"""Explainers that are shipped: written without paths of a machine, listed, and found by name and by backbone."""

import copy
import json

import pytest
import torch
from conftest import timm_model, wake
from toys import VECTORS

import explainers
from benchmarks.shipping import ship
from explainers.anyhead import AnyHead
from explainers.errors import InputError
from explainers.saved.weights import read_weights
from explainers.share import catalogue

NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
MEASURED = {"Fidelity⁺ ↑": {"anyhead": 0.5, "chance": 0.25}, "settings": {"images": 100}}
IMAGES = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def trained():
    """An explainer of a small target."""
    target = timm_model(as_target=True)
    explainer = AnyHead(target, target.grid, VECTORS, temperature=2.0)
    wake(explainer.network)
    return explainer.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    """The folder of its run."""
    folder = tmp_path_factory.mktemp("home") / "run"
    trained.export(folder)
    (folder / "versions.json").write_text(
        json.dumps({"command": ["train.py", str(folder)], "packages": {"torch": "2.6"}})
    )
    return folder


@pytest.fixture(scope="module")
def home(trained, run, tmp_path_factory):
    """A folder with the explainer, as if it were shipped for ViT-Tiny."""
    home = tmp_path_factory.mktemp("shipped")
    command = "python train.py experiment=anyhead target=vit_tiny"
    ship(run, home / NAME / "anyhead", "photos (CC0)", command, MEASURED, trained.target)
    return home


@pytest.fixture
def shipped(home, monkeypatch):
    monkeypatch.setattr(catalogue, "SHIPPED", home)
    return home / NAME / "anyhead"


def test_a_shipped_folder_has_16_bits_and_no_path_of_the_machine(shipped, run):
    names = {path.name for path in shipped.iterdir()}
    assert names == {"README.md", "explainer.safetensors", "measured.json"}
    for name in names - {"explainer.safetensors"}:
        assert str(run.parent) not in (shipped / name).read_text()
    card = (shipped / "README.md").read_text()
    parts = "python train.py experiment=anyhead", "photos (CC0)", "| anyhead | 0.500 |", "torch 2", f'load("{NAME}")'
    assert all(part in card for part in parts)
    assert (shipped / "explainer.safetensors").stat().st_size < 0.7 * (run / "explainer.safetensors").stat().st_size


@torch.no_grad()
def test_load_finds_a_shipped_explainer_by_the_name_of_its_model(shipped, trained):
    for name in (NAME, "vit_tiny_patch16_224", f"{NAME}/anyhead", shipped):  # timm's default tag may be left out
        loaded = explainers.load(name, target=trained.target)
        expected = trained(IMAGES)
        assert type(loaded) is AnyHead and {weight.dtype for weight in loaded.parameters()} == {torch.float32}
        assert (loaded(IMAGES) - expected).abs().max() < 5e-3 * expected.abs().max()
    with pytest.raises(InputError, match=f"got vit_small.*no such folder, and explainers are shipped for {NAME} alone"):
        explainers.load("vit_small_patch16_224")
    with pytest.raises(InputError, match="trained on other weights"):
        explainers.load(NAME, target=timm_model(as_target=True, seed=1))


def test_available_lists_size_measurements_and_the_command_for_another_model(shipped):
    (entry,) = explainers.available()
    assert (entry.name, entry.explainer, entry.measured, entry.folder) == (NAME, "anyhead", MEASURED, shipped)
    assert entry.bytes == (shipped / "explainer.safetensors").stat().st_size
    text = repr(explainers.available())
    assert all(part in text for part in (NAME, "0.500", "0.250", "python train.py experiment=anyhead target=<name"))


def test_the_catalogue_is_searched_by_the_weights_of_the_backbone(shipped, trained):
    assert [entry.name for entry in catalogue.for_target(copy.deepcopy(trained.target))] == [NAME]
    other = copy.deepcopy(trained.target)
    other.backbone.patch_embed.proj.weight.data[0] += 1
    assert catalogue.for_target(other) == [] == catalogue.for_target(timm_model("test_resnet", as_target=True))


@torch.no_grad()
def test_a_rounded_copy_of_the_backbone_has_the_same_explainer(shipped, trained):
    for dtype in (torch.float16, torch.bfloat16):
        rounded = copy.deepcopy(trained.target).to(dtype).float()
        assert [entry.name for entry in catalogue.for_target(rounded)] == [NAME]
        with pytest.warns(UserWarning, match="vit_tiny_patch16_224: a rounded copy of the weights that .* trained on"):
            explainers.load(NAME, target=rounded)
    tuned = copy.deepcopy(trained.target)
    generator = torch.Generator().manual_seed(0)
    for weight in tuned.backbone.blocks[-1].parameters():
        weight += 0.05 * weight.abs().mean() * torch.randn(weight.shape, generator=generator)
    assert catalogue.for_target(tuned) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [("command", "python train.py data.root=/home/me"), ("images", "~/photos"), ("measured", {"Fidelity": 0.5})],
)
def test_what_may_not_be_shipped_is_refused(setting, value, run, trained, tmp_path):
    given = {"images": "photos", "command": "python train.py", "measured": MEASURED, "target": trained.target}
    with pytest.raises(InputError, match=setting):
        ship(run, tmp_path / NAME / "anyhead", **given | {setting: value})
    assert not (tmp_path / NAME).exists()


def test_what_this_package_ships_is_small_and_complete():
    assert explainers.available()
    for entry in explainers.available():
        names = {path.name for path in entry.folder.iterdir()}
        assert names == {"README.md", "explainer.safetensors", "measured.json"}
        identity, weights = read_weights(entry.folder / "explainer.safetensors")
        assert entry.bytes <= 4e6 and torch.half in {weight.dtype for weight in weights.values()}
        assert entry.name.startswith(f"{identity['target']['backbone']}.")
