"""Trained explainers as folders: what `load` reads, and what is saved for others."""

import copy
import json
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from commands import QUIET, ROOT, SMALL_DIGITS, SMALL_PAPER_NETWORK, TINY_RUN, composed, train
from conftest import wake
from huggingface_hub import ModelCard
from hydra.utils import instantiate
from toys import exported

import explainers
from explainers.anyhead import AnyHead
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.fetching import save_target
from explainers.shapley import Shapley
from explainers.share import pretrained
from explainers.share.pretrained import CARD, RECORD
from explainers.tve import TVE, LightNetwork
from explainers.vectors import SelfExplaining

IMAGES = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
CLASSES = torch.tensor([9, 0, 4])
EXPLAINER = "explainer.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The model to explain."""
    return wake(instantiate(composed("target=tiny", folder=tmp_path_factory.mktemp("target")).target)).eval()


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """The folder of a run of train.py."""
    path = tmp_path_factory.mktemp("target") / "target.safetensors"
    save_target(target, path)
    folder = tmp_path_factory.mktemp("library") / "runs" / "tve_vitb"
    given = f"target.model.checkpoint_path={path}"
    train(*TINY_RUN, *SMALL_DIGITS, "cache=none", "trainer.max_epochs=1", given, folder=folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run's folder, to change."""
    return shutil.copytree(trained, tmp_path / "run")


@torch.no_grad()
def same(explainer, other):
    pairs = ((explainer(IMAGES, classes), other(IMAGES, classes)) for classes in (CLASSES, None))
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (TVE, ("explainers@explainer=tve", "explainer.pooling=3", "explainer.hops=[1,2]")),
        (TVE, ("explainers@explainer=tve_paper", *SMALL_PAPER_NETWORK, "explainer.score=logit")),
        (AnyHead, ("explainers@explainer=anyhead", "explainer.temperature=inf")),
        (
            Shapley,
            ("explainers@explainer=vit_shapley", "explainer.network.freeze=false", "explainer.normalisation=none"),
        ),
        (Shapley, ("explainers@explainer=fastshap", "explainer.network.backbone=test_resnet")),
    ],
    ids=["tve", "tve_paper", "anyhead", "vit_shapley", "fastshap"],
)
def test_a_learned_explainer_is_loaded_as_its_file_says(kind, settings, target, tmp_path):
    cfg = composed("target=tiny", *settings, *QUIET, folder=tmp_path)
    explainer = instantiate(cfg.explainer, target=copy.deepcopy(target))
    assert isinstance(explainer, kind)
    wake(explainer.network)
    loaded = explainers.load(explainer.export(tmp_path), target)
    assert type(loaded) is kind and same(loaded, explainer.eval())
    assert loaded.identity() == explainer.identity()
    assert all(getattr(loaded, name) == getattr(explainer, name) for name in kind.READING)
    assert not any(part.training for part in loaded.modules())
    assert not any(weight.requires_grad for weight in loaded.parameters())
    predicted = loaded.target(IMAGES).argmax(-1)
    assert torch.equal(loaded(IMAGES), loaded(IMAGES, predicted))
    with pytest.raises(InputError, match=r"images\[None"):
        loaded(IMAGES[0])


def test_a_model_that_explains_itself_is_loaded_with_its_architecture_alone(target, tmp_path):
    path = exported(target, target.grid, tmp_path, seed=4, classes=10)
    loaded = explainers.load(tmp_path, target)
    assert same(loaded, SelfExplaining(target, target.grid, weights=path).eval())


def test_a_model_of_timm_needs_no_target_if_its_weights_are_here(tmp_path, monkeypatch):
    """At another image size than that of its weights, too."""
    asked = []

    def create_model(name, pretrained, **settings):
        asked.append((name, pretrained, settings))
        return timm_vit(**settings)

    def timm_vit(img_size=224):
        model = timm.create_model("vit_tiny_patch16_224", img_size=img_size, depth=1)
        return wake(model).eval()

    monkeypatch.setattr(pretrained, "create_model", create_model)
    for size in (224, 64):
        explained = TargetModel(timm_vit(size)).eval()
        explainer = TVE(explained, explained.grid, partial(LightNetwork, blocks=[0], width=8)).eval()
        loaded = explainers.load(explainer.export(tmp_path / str(size)).parent)
        images = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8)
        assert torch.equal(loaded(images), explainer(images))
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert asked == [(name, True, {}), (name, True, {"img_size": 64})]


def test_a_trained_run_is_loaded_with_the_weights_of_its_end(trained, target):
    loaded = explainers.load(str(trained), target)
    last = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(last[f"network.{name}"], value) for name, value in loaded.network.state_dict().items())
    assert loaded.target.name == "vit_tiny_patch16_224"


def test_another_head_on_the_same_backbone_can_be_given_and_no_other_backbone(run, target):
    other = copy.deepcopy(target)
    other.head = torch.nn.Linear(48, 3)
    assert explainers.load(run, target=other).all_classes(IMAGES).shape == (3, 3, 8, 8)
    with torch.no_grad():
        next(other.backbone.parameters()).add_(1)
    with pytest.raises(InputError, match="was trained on other weights of vit_tiny_patch16_224"):
        explainers.load(run, target=other)


@pytest.mark.slow
def test_a_saved_folder_is_loaded_by_load_and_by_its_class(trained, target, tmp_path):
    loaded = explainers.load(trained, target)
    folder = loaded.save_pretrained(tmp_path / "saved")
    assert {path.name for path in folder.iterdir()} == {EXPLAINER, *RECORD, CARD}
    found = (explainers.load(folder, target), TVE.from_pretrained(folder, target), pickle.loads(pickle.dumps(loaded)))
    for again in found:
        assert same(again, loaded)
        again.save_pretrained(tmp_path / "again")
        for name in (EXPLAINER, *RECORD, CARD):
            assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert all((folder / name).read_bytes() == (trained / name).read_bytes() for name in (EXPLAINER, *RECORD))
    with pytest.raises(InputError, match="^expected Shapley in .*, got TVE: use explainers.load"):
        Shapley.from_pretrained(folder, target)
    built = TVE(loaded.target, loaded.grid, lambda target, grid: loaded.network, hops=loaded.hops)
    assert same(explainers.load(built.save_pretrained(tmp_path / "built"), target), built.eval())  # without a record


def test_the_model_card_says_what_is_explained_and_how_it_was_trained(run, target, tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/table.md").write_text("| Task | Fidelity |\n|---|---|\n| digits | 0.5 |\n")
    loaded = explainers.load(run, target)
    versions = json.loads((run / "versions.json").read_text()) | {
        "command": ["train.py", "experiment=demo/tve", "a=b c"]
    }
    loaded.record = loaded.record | {"versions.json": json.dumps(versions)}
    loaded.save_pretrained(tmp_path, evaluation=tmp_path / "eval", license="mit")
    card = ModelCard((tmp_path / CARD).read_text())
    assert card.data.license == "mit" and card.data.library_name == "transferable-explainers"
    assert "tve" in card.data.tags and card.data.base_model is None  # not the architecture of timm's weights
    assert loaded.identity()["target"]["backbone_sha256"] in card.text and "8 × 8 patches" in card.text
    assert "python train.py experiment=demo/tve 'a=b c'" in card.text
    assert card.text.rstrip().endswith("| digits | 0.5 |") and f"torch {versions['packages']['torch']}" in card.text
    with pytest.raises(InputError, match="table.md, got no file"):
        loaded.save_pretrained(tmp_path, evaluation=run)


def test_an_id_is_fetched_from_the_hub(trained, target, monkeypatch):
    asked = []

    def snapshot_download(repository, revision, allow_patterns):
        asked.append((repository, revision, set(allow_patterns)))
        return str(trained)

    monkeypatch.setattr(pretrained, "snapshot_download", snapshot_download)
    assert same(explainers.load("hf://user/my-tve", target, "v1"), explainers.load(trained, target))
    assert TVE.from_pretrained("user/my-tve", target).target.name
    files = {EXPLAINER, "model.safetensors", *RECORD}
    assert asked == [("user/my-tve", "v1", files), ("user/my-tve", None, files)]


UNKNOWN = [f"hf://{name}" for name in ("user/typo", "typo", "-/-", f"user/{'x' * 500}")]


@pytest.mark.parametrize("source", [*UNKNOWN, "runs/tve_vitb", "x" * 500])
def test_what_cannot_be_loaded_is_refused_and_the_hub_asked_for_its_own_names_alone(source, monkeypatch):
    def snapshot_download(*args, **kwargs):
        assert source in UNKNOWN
        raise OSError("404 Client Error.\nRepository Not Found")

    monkeypatch.setattr(pretrained, "snapshot_download", snapshot_download)
    with pytest.raises(InputError) as refused:
        explainers.load(source)
    assert source[:90] in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_has_no_revisions_and_a_run_that_has_not_ended_no_explainer(run):
    with pytest.raises(InputError, match="revision=v1"):
        explainers.load(run, revision="v1")
    (run / EXPLAINER).unlink()
    with pytest.raises(InputError, match=f"{run}"):
        explainers.load(run)


class Hub:
    """The Hub, as far as an upload sees it."""

    def __init__(self):
        self.made, self.files = [], {}

    def create_repo(self, repository, private, exist_ok):
        self.made.append((repository, private, exist_ok))

    def upload_folder(self, repo_id, folder_path, commit_message):
        folder = Path(folder_path)
        self.files[repo_id] = {path.name: path.read_bytes() for path in folder.iterdir()}
        return f"https://huggingface.co/{repo_id}"


def test_the_examples_of_the_library_page_run(trained, target, tmp_path, monkeypatch):
    """All but the export, see `test_export`; on smaller images."""
    hub = Hub()
    monkeypatch.setattr(pretrained, "HfApi", lambda: hub)
    monkeypatch.setattr(pretrained, "_model", lambda *args, **kwargs: copy.deepcopy(target))
    shutil.copytree(trained, tmp_path / "runs" / "tve_vit_base")
    monkeypatch.chdir(tmp_path)
    names = {}
    *examples, export, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    for example in examples:
        exec(example.replace("(2, 3, 224, 224)", "(2, 3, 64, 64)"), names)
    assert names["heatmaps"].shape == (2, 8, 8) and names["picture"].shape == (3, 64, 64)
    assert same(explainers.load("shared"), names["explainer"]) and "user/name" in hub.files
    assert names["attributions"].shape == names["inputs"].shape and (names["sensitivity"] > 0).all()
    assert "onnx" in export
