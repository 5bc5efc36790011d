"""The examples of docs/how_to run as they are printed."""

import doctest
import importlib
import re
import sys
from shutil import copy

import pytest
import torch
from clips import TEXT, clip, image_tower, open_clip
from commands import ROOT, composed
from hydra.utils import instantiate
from omegaconf import OmegaConf
from toys import fit

import datamodules
import explainers
from explainers import posthoc
from explainers.models import TargetModel
from explainers.text import clip_text_head
from explainers.tve import LightNetwork

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs/how_to").glob("*.md"))}
BLOCK = re.compile(r"```(?:python|yaml)\n(?:# (\S+\.(?:py|yaml))\n)?(.*?)```", re.DOTALL)


@pytest.fixture
def add_files(tmp_path, monkeypatch):
    """Adds the files of a page to the packages and to the configs."""
    for package in (datamodules, explainers, posthoc):
        own = str(tmp_path / package.__name__.replace(".", "/"))
        monkeypatch.setattr(package, "__path__", [*package.__path__, own])

    def add(page):
        for path, code in BLOCK.findall(PAGES[page]):
            if path:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(code)
        importlib.invalidate_caches()

    yield add
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def compose(tmp_path):
    """Composes with the configs of a page."""
    return lambda *overrides: composed(*overrides, f"hydra.searchpath=[file://{tmp_path}/configs]", folder=tmp_path)


def run(page):
    """The names that the code of a page defines, besides its files."""
    names = {}
    for path, code in BLOCK.findall(PAGES[page]):
        if not path:
            exec(code, names)
    return names


def test_a_post_hoc_method_is_known_by_its_name(add_files, monkeypatch):
    add_files("posthoc_method")
    method = importlib.import_module("explainers.posthoc.pixel_products").PixelProducts
    monkeypatch.setattr(posthoc, "PixelProducts", method, raising=False)
    monkeypatch.setattr(posthoc, "__all__", [*posthoc.__all__, "PixelProducts"])
    heatmaps = run("posthoc_method")["heatmaps"]
    assert heatmaps.shape == (2, 10, 10) and heatmaps.isfinite().all()


def test_a_learned_method_trains_and_is_saved(add_files, compose, tmp_path):
    add_files("learned_method")
    cfg = compose("explainers@explainer=additive", "target=tiny", "data=digits")
    module, images = instantiate(cfg.module), torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    before = module.explainer.all_classes(images)
    trained = fit(module, images, epochs=2, validate=True).lightning_module.explainer.eval()
    loaded = instantiate(cfg.explainer, target=trained.target, weights=str(trained.export(tmp_path)))
    assert trained(images).shape == (4, 8, 8) and not torch.equal(before, trained.all_classes(images))
    torch.testing.assert_close(loaded.eval()(images), trained(images))


def test_a_metric_is_a_mean_with_its_standard_error():
    names = run("metric")
    examples = doctest.DocTestFinder().find(names["cosine"], "cosine", module=False, globs=names)
    assert doctest.DocTestRunner().run(examples[0]) == (0, 1)
    assert 0 < names["metric"].compute() <= 1 and names["metric"].standard_error() > 0


def test_a_data_set_gives_batches(add_files, compose):
    add_files("data_set")
    datamodule = instantiate(compose("data=stripes", "target=tiny").data)
    batch = next(iter(datamodule.test_dataloader()))
    assert batch["image"].shape == (64, 3, 64, 64) and datamodule.classes == ["row", "column"]
    assert datamodule.fingerprint("val") != datamodule.fingerprint("test")


def test_a_target_is_built_and_its_blocks_are_read(add_files, compose):
    add_files("target")
    config = compose("target=mobilenet", "target.model.pretrained=false")
    target, grid = instantiate(config.target), instantiate(config.grid)
    assert len(LightNetwork(target, grid, config.blocks, width=8, depth=1).read) == 4
    assert run("target")["logits"].shape == (2, 2)


@pytest.mark.slow
def test_any_model_is_explained_and_viewed_by_captum():
    names = run("any_model")
    assert names["heatmaps"].shape == (2, 10, 10) and names["heatmaps"].isfinite().all()
    assert {"DecompX", "AttnLRP", "RISE"} <= set(names["methods"]) and names["target"].classes == ["cat", "dog"]
    assert names["field"].heatmap.shape == (10, 10) and names["field"].image.shape == (3, 160, 160)
    assert names["pixels"].shape == (2, 3, 160, 160) and names["region"].score == "value"
    found, none = ({"boxes": names["box"][:count], "scores": torch.tensor([0.5])[:count]} for count in (1, 0))
    assert names["read_score"]([found, none]).tolist() == [0.5, 0]


@torch.no_grad()
def test_texts_and_likeness_are_explained(tmp_path, monkeypatch):
    """By a small CLIP with random weights."""
    monkeypatch.chdir(tmp_path)
    copy(ROOT / "docs/photos/cat_and_coffee.jpg", tmp_path / "photo.jpg")
    target, library, small = image_tower(), open_clip(), clip()
    monkeypatch.setattr(library, "create_model", lambda *_, **__: small)
    monkeypatch.setattr("explainers.text.heads.text_tower", lambda *_: ("tiny-quickgelu", ""))
    words, length = ["cat", "dog", "cup"], TEXT["context_length"]
    tokenise = library.tokenizer.SimpleTokenizer(context_length=length)
    monkeypatch.setattr(library, "get_tokenizer", lambda _: tokenise)
    explain = explainers.explain
    monkeypatch.setattr(explainers, "explain", lambda image, _, **given: explain(image, target, **given), raising=False)
    names = {"target": target, "words": words, "classifier": TargetModel(target.backbone, torch.nn.Linear(24, 3))}
    names |= {"images": torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8), "class_texts": words}
    names |= {"others": names["images"].flip(0), "centre": None, "embeddings_of_others": torch.randn(2, 24)}
    names |= {"embeddings": torch.randn(2, 24), "labels": torch.tensor([0, 1])}
    names["encode"] = clip_text_head(target).encode
    for path, code in BLOCK.findall(PAGES["words"]):
        exec(code, names) if not path else None
    assert names["heatmaps"].shape == (2, 2, 4, 4) and names["scores"].shape == (2, 3)
    assert (tmp_path / "furry.png").is_file() and names["pairs"].shape == (2, 16, 16)


def test_an_experiment_composes(add_files, compose):
    add_files("experiment")
    config = compose("experiment=tve_wide")
    OmegaConf.resolve(config)
    assert config.explainer.hops == [1, 2, 4] and config.name == "tve_wide"
