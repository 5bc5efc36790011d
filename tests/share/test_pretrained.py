"""Trained explainers as folders: what `load` reads, and what is saved for others."""

import copy
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from commands import QUIET, ROOT, SMALL_DIGITS, TINY_RUN, composed, train
from conftest import wake
from huggingface_hub import ModelCard
from hydra.utils import instantiate
from omegaconf import OmegaConf
from toys import exported

import explainers
from explainers import share
from explainers.anyhead import AnyHead
from explainers.errors import InputError
from explainers.models.fetching import save_target
from explainers.report import overlays
from explainers.shapley import Shapley
from explainers.share import pretrained, reading
from explainers.share.model_cards import model_card
from explainers.share.pretrained import CARD
from explainers.share.reading import CONFIG, VERSIONS
from explainers.tve import TVE
from explainers.vectors import SelfExplaining

IMAGES = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
CLASSES = torch.tensor([9, 0, 4])
GRID = {"image_size": 64, "patch_size": 8}
EXPLAINER = "explainer.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The file of the model to explain."""
    path = tmp_path_factory.mktemp("target") / "target.safetensors"
    save_target(wake(instantiate(composed("target=tiny", folder=path.parent).target)), path)
    return path


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """The folder of a run of train.py."""
    folder = tmp_path_factory.mktemp("library") / "runs" / "tve_vitb"
    given = f"target.model.checkpoint_path={checkpoint}"
    train(*TINY_RUN, *SMALL_DIGITS, "cache=none", "trainer.max_epochs=1", given, folder=folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run's folder, to change."""
    return shutil.copytree(trained, tmp_path / "run")


def change(run, key, value):
    """Set one key of the run's config."""
    config = OmegaConf.load(run / CONFIG)
    OmegaConf.update(config, key, value)
    (run / CONFIG).write_text(OmegaConf.to_yaml(config))


@torch.no_grad()
def same(explainer, other):
    return all(torch.equal(explainer(IMAGES, classes), other(IMAGES, classes)) for classes in (CLASSES, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (TVE, ("explainers@explainer=tve", "explainer.pooling=3")),
        (AnyHead, ("explainers@explainer=anyhead",)),
        (Shapley, ("explainers@explainer=shapley_light",)),
    ],
    ids=["tve", "anyhead", "shapley"],
)
def test_a_learned_explainer_is_loaded_as_its_config_says(kind, settings, checkpoint, tmp_path):
    cfg = composed("target=tiny", *settings, *QUIET, f"target.model.checkpoint_path={checkpoint}", folder=tmp_path)
    explainer = instantiate(cfg.explainer)
    assert isinstance(explainer, kind)
    wake(explainer.network)
    explainer.export(tmp_path)
    (tmp_path / CONFIG).write_text(OmegaConf.to_yaml(cfg, resolve=True))
    loaded = explainers.load(tmp_path)
    assert type(loaded) is kind and same(loaded, explainer.eval())
    assert not any(part.training for part in loaded.modules())
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert loaded.optimizer is loaded.scheduler is None and getattr(loaded, "teacher", None) is None
    predicted = loaded.target(IMAGES).argmax(-1)
    assert torch.equal(loaded(IMAGES), loaded(IMAGES, predicted))
    with pytest.raises(
        InputError, match=r"^expected images of shape \(B, C, H, W\), got \[3, 64, 64\]: .* images\[None"
    ):
        loaded(IMAGES[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SelfExplaining", "ExplainabilityVector"])
def test_a_model_that_explains_itself_is_loaded_with_its_architecture_alone(kind, checkpoint, run):
    (run / EXPLAINER).unlink()
    settings = yaml.safe_load((run / CONFIG).read_text())
    target, grid = (instantiate(settings["explainer"][name]) for name in ("target", "grid"))
    path = exported(target, grid, run, seed=4, classes=10)
    own = {"_target_": f"explainers.vectors.{kind}", "onto": "gone.safetensors", "teacher": "gone.safetensors"}
    change(run, "explainer", own | {name: settings["explainer"][name] for name in ("target", "grid")})
    loaded = explainers.load(run)
    assert same(loaded, SelfExplaining(target, grid, alpha=1, weights=path).eval())


def test_a_trained_run_is_loaded_with_the_weights_of_its_end(trained):
    loaded = explainers.load(str(trained))
    last = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(last[f"network.{name}"], value) for name, value in loaded.network.state_dict().items())
    assert loaded.target.name == "vit_tiny_patch16_224"


def test_initial_weights_and_the_files_of_training_are_not_needed(run):
    """All of these would have to be fetched."""
    before = explainers.load(run)
    change(run, "explainer.weights", "gone.safetensors")
    change(run, "module.optimizer", {"_target_": "gone.Adam"})
    change(run, "data.root", "gone")
    assert same(explainers.load(run), before)
    settings = TVE.settings_to_load({"network": {"mae": "gone", "pretrained": True, "width": 3}, "grid": {}})
    assert settings == {"network": {"mae": None, "pretrained": False, "width": 3}, "grid": {}}


def test_another_head_on_the_same_backbone_can_be_given_and_no_other_backbone(run):
    expected = explainers.load(run)
    change(run, "explainer.target.model.checkpoint_path", "/gone/target.safetensors")
    with pytest.raises(InputError, match=r"at /gone/target\.safetensors, got no file: .*target=TargetModel\(\.\.\.\)"):
        explainers.load(run)
    assert same(explainers.load(run, target=copy.deepcopy(expected.target)), expected)
    other = copy.deepcopy(expected.target)
    other.head = torch.nn.Linear(48, 3)
    assert explainers.load(run, target=other).all_classes(IMAGES).shape == (3, 3, 8, 8)
    with torch.no_grad():
        next(other.backbone.parameters()).add_(1)
    with pytest.raises(InputError, match="was trained on other weights of vit_tiny_patch16_224"):
        explainers.load(run, target=other)


def damage(run):
    (run / CONFIG).write_text("explainer: [")


def classifier(run):
    change(run, "explainer", None)
    change(run, "module", {"_target_": "explainers.training.Classifier"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "^expected the folder of a run, or hf://user/name .*: there is no such folder, and "),
        (
            lambda run: (run / CONFIG).unlink(),
            r"^expected the config of a run of train\.py at .*, got no file",
        ),
        (damage, "^.*config.yaml: expected the config of the run, got a damaged file"),
        (lambda run: (run / EXPLAINER).unlink(), "^expected a trained explainer in .*, which has not ended: run its"),
        (classifier, r"^expected the run of an explainer in .*, got one of explainers\.training\.Classifier"),
        (
            lambda run: change(run, "explainer.target.head", "gone.safetensors"),
            r"^expected the model that .* explains at gone\.safetensors, got",
        ),
        (lambda run: change(run, "explainer.grid.patch_size", 7), "^image_size 64 is not a multiple of patch_size 7"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(spoil, message, run):
    spoil(run)
    with pytest.raises(InputError, match=message) as caught:
        explainers.load(run)
    assert "\n" not in str(caught.value)


def test_a_saved_folder_is_loaded_by_load_and_by_its_class(trained, tmp_path):
    loaded = explainers.load(trained)
    folder = loaded.save_pretrained(tmp_path / "saved")
    assert {path.name for path in folder.iterdir()} == {EXPLAINER, CONFIG, VERSIONS, CARD}
    for again in (explainers.load(folder), TVE.from_pretrained(folder), pickle.loads(pickle.dumps(loaded))):
        assert same(again, loaded)
        again.save_pretrained(tmp_path / "again")
        for name in (EXPLAINER, CONFIG, VERSIONS, CARD):
            assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert all((folder / name).read_bytes() == (trained / name).read_bytes() for name in (EXPLAINER, CONFIG, VERSIONS))
    with pytest.raises(InputError, match="^expected Shapley in .*, got TVE: use explainers.load"):
        Shapley.from_pretrained(folder)
    with pytest.raises(InputError, match="got TVE without the config of its run"):
        TVE(loaded.target, loaded.grid, lambda target, grid: loaded.network).save_pretrained(folder)


def test_the_model_card_says_what_is_explained_and_how_it_was_trained(run, tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/table.md").write_text("| Task | Fidelity |\n|---|---|\n| digits | 0.5 |\n")
    loaded = explainers.load(run)
    versions = json.loads((run / VERSIONS).read_text()) | {
        "command": ["train.py", "experiment=quickstart_tve", "a=b c"]
    }
    loaded.record = loaded.record | {VERSIONS: json.dumps(versions)}
    loaded.save_pretrained(tmp_path, evaluation=tmp_path / "eval", license="mit")
    card = ModelCard((tmp_path / CARD).read_text())
    assert card.data.license == "mit" and card.data.library_name == "transferable-explainers"
    assert "tve" in card.data.tags and card.data.base_model is None  # random weights
    assert loaded.identity()["target"]["backbone_sha256"] in card.text and "8 × 8 patches" in card.text
    assert "python train.py experiment=quickstart_tve 'a=b c'" in card.text and "DigitImages" in card.text
    assert card.text.rstrip().endswith("| digits | 0.5 |") and f"torch {versions['packages']['torch']}" in card.text
    for path, expected in (("", "timm/resnet50.tv_in1k"), ("own.safetensors", None)):
        model = {"model_name": "resnet50.tv_in1k", "pretrained": True, "checkpoint_path": path}
        config = {"explainer": {"target": {"model": model}, "grid": GRID}}
        text = model_card("TVE", "Learns.", loaded.identity(), config, {})
        assert ModelCard(text).data.base_model == expected
    with pytest.raises(InputError, match=r"^expected the table of a run of eval\.py at .*table.md, got no file"):
        loaded.save_pretrained(tmp_path, evaluation=run)


def test_an_id_is_fetched_from_the_hub(trained, monkeypatch):
    asked = []

    def snapshot_download(repository, revision, allow_patterns):
        asked.append((repository, revision, set(allow_patterns)))
        return str(trained)

    monkeypatch.setattr(reading, "snapshot_download", snapshot_download)
    assert same(explainers.load("hf://user/my-tve", revision="v1"), explainers.load(trained))
    assert TVE.from_pretrained("user/my-tve").target.name
    files = {EXPLAINER, "model.safetensors", CONFIG, VERSIONS}
    assert asked == [("user/my-tve", "v1", files), ("user/my-tve", None, files)]


def test_a_repository_that_is_not_there_is_refused_in_one_line(monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise OSError("404 Client Error.\nRepository Not Found")

    monkeypatch.setattr(reading, "snapshot_download", snapshot_download)
    for load in (lambda: explainers.load("hf://user/typo"), lambda: TVE.from_pretrained("user/typo")):
        with pytest.raises(InputError, match=r"got hf://user/typo, of which it says: 404 Client Error\.$"):
            load()
    with pytest.raises(InputError, match="as hf://user/name, got hf://typo$"):
        explainers.load("hf://typo")


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(trained, monkeypatch):
    monkeypatch.setattr(reading, "snapshot_download", lambda *args, **kwargs: pytest.fail("the Hub was asked"))
    with pytest.raises(InputError, match="or hf://user/name of the Hugging Face Hub, got runs/tve_vitb: there is no"):
        explainers.load("runs/tve_vitb")
    with pytest.raises(InputError, match="^expected hf://user/name for revision=v1, got .*folders have no revisions$"):
        explainers.load(trained, revision="v1")


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


def test_what_is_pushed_is_what_is_saved(trained, tmp_path, monkeypatch):
    hub, loaded = Hub(), explainers.load(trained)
    monkeypatch.setattr(pretrained, "HfApi", lambda: hub)
    assert loaded.push_to_hub("user/name", private=True) == "https://huggingface.co/user/name"
    saved = {path.name: path.read_bytes() for path in loaded.save_pretrained(tmp_path).iterdir()}
    assert hub.made == [("user/name", True, True)] and hub.files == {"user/name": saved}


def test_the_library_offers_load_and_overlay():
    assert explainers.load is share.load and explainers.overlay is overlays.overlay
    with pytest.raises(AttributeError, match="has no attribute 'save'"):
        explainers.save  # noqa: B018


def test_the_examples_of_the_library_page_run(trained, tmp_path, monkeypatch):
    """All but the export, see `test_export`; on smaller images."""
    hub = Hub()
    monkeypatch.setattr(pretrained, "HfApi", lambda: hub)
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
