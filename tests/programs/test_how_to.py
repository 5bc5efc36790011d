"""The examples of docs/how_to run as they are printed."""

import importlib
import inspect
import re
import sys
from types import ModuleType

import pytest
from commands import ROOT, composed
from hydra.utils import instantiate
from omegaconf import OmegaConf

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs/how_to").glob("*.md"))}
BLOCK = re.compile(r"```(?:python|yaml)\n(?:# (\S+\.(?:py|yaml))\n)?(.*?)```", re.DOTALL)


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Does what a page says: its files are there, rooms export the new classes, and the other code has run."""

    def add_module(path, code):
        module = ModuleType(path.removesuffix(".py").replace("/", "."))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, path, "exec"), vars(module))
        room = importlib.import_module(module.__name__.rpartition(".")[0])
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__:
                monkeypatch.setattr(room, name, kind, raising=False)
                monkeypatch.setattr(room, "__all__", [*getattr(room, "__all__", []), name], raising=False)

    def follow(page):
        names = {}
        for path, code in BLOCK.findall(PAGES[page]):
            if path.endswith(".py"):
                add_module(path, code)
            elif path:
                (tmp_path / path).parent.mkdir(parents=True)
                (tmp_path / path).write_text(code)
            else:
                exec(code, names)
        return names

    return follow


@pytest.fixture
def compose(tmp_path):
    """Composes with the configs of a page."""
    return lambda *overrides: composed(*overrides, f"hydra.searchpath=[file://{tmp_path}/configs]", folder=tmp_path)


def test_a_post_hoc_method_is_known_by_its_name(follow):
    names = follow("posthoc_method")
    assert names["heatmaps"].shape == (2, 10, 10) and names["heatmaps"].isfinite().all()


def test_a_data_set_gives_batches(follow, compose):
    follow("data_set")
    datamodule = instantiate(compose("data=stripes", "target=tiny").data)
    batch = next(iter(datamodule.test_dataloader()))
    assert batch["image"].shape == (64, 3, 64, 64) and datamodule.classes == ["row", "column"]
    assert datamodule.fingerprint("val") != datamodule.fingerprint("test")


def test_an_experiment_composes(follow, compose):
    follow("experiment")
    config = compose("experiment=tve_wide")
    OmegaConf.resolve(config)
    assert config.explainer.hops == [1, 2, 4] and config.name == "tve_wide"


def test_every_page_is_listed_and_has_an_example():
    listed = set(re.findall(r"\((\w+)\.md\)", PAGES["README"]))
    assert listed == PAGES.keys() - {"README"} and all(BLOCK.search(PAGES[page]) for page in listed)
