"""What README and docs say to type works."""

import inspect
import json
import re
import shlex
from functools import reduce
from pathlib import Path
from shutil import copy

import pytest
import timm
import torch
from commands import ROOT, composed
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from test_configs import options_of

import explainers
from explainers.app import page
from explainers.app.page import serve
from explainers.models import TargetModel, convert
from explainers.saved.weights import read_weights
from explainers.share.catalogue import SHIPPED

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "docs").rglob("*.sh"),
    *(ROOT / "docs").rglob("*.yaml"),
]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text().replace("\\\n", " ") for path in PAGES}
NOTEBOOK = ROOT / "docs/tutorial.ipynb"
SMALL = {"mlp_ratio": 0.25}
# Of loops in the shell; all others hold options
VARIABLES = {"d": "cifar10", "task": "imagenette", "t": "imagenette", "s": "cifar10"}


def substituted(arguments):
    """A command without the variables of the shell and without what a reader fills in.

    Interpolations of Hydra, such as ${data.domain}, stay.
    """
    variable = r"\$(?:\{(\w+)\}|(\w+))"
    return re.sub(variable, lambda name: VARIABLES.get(name[1] or name[2], ""), arguments).replace("...", "")


COMMANDS = sorted(
    {
        (script, " ".join(substituted(arguments).split()))
        for text in TEXTS.values()
        for script, arguments in re.findall(
            r'python (train|eval)\.py (?!-m)([^\n`#"]*)', text
        )  # sweeps: test_sweeps.py
        if not re.search(r"[=,]\.\.\.|<[^>]+>", arguments)
    }
)


ABSTRACT = {"default", "torchvision", "unlabelled", "anyhead_common", "tve_common", "shapley_common"}


def is_known(word, cfg):
    """Whether an override sets a key of the config, or chooses a file that there is."""
    key, _, value = word.lstrip("~").partition("=")
    if (ROOT / "configs" / key).is_dir() and word[0] != "~":
        return key == "target" or {*value.strip("[]").split(",")} - {""} <= options_of(key)
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return isinstance(node, DictConfig) and last in set(node)


@pytest.mark.slow
def test_every_command_composes(tmp_path):
    """Those that set keys of their experiment, tasks, explainers and figures, by these; any others by themselves."""
    groups = {"tasks": "data", "explainers": "explainers", "figures": "figures"}
    lists = {key: sorted(options_of(group) - ABSTRACT) for key, group in groups.items()}
    every = composed(
        *(f"{group}=[{','.join(names)}]" for group, names in lists.items()), folder=tmp_path, config="eval"
    )
    for script, arguments in COMMANDS:
        words = [word for word in shlex.split(arguments) if word not in ("--cfg", "job")]
        cfg = composed(*(word for word in words if word.startswith("experiment=")), folder=tmp_path, config=script)
        if not all(
            word.startswith("experiment=") or any(is_known(word, each) for each in (cfg, every)) for word in words
        ):
            composed(*words, folder=tmp_path, config=script)


@pytest.fixture
def random_weights(monkeypatch):
    """timm's models, their MLPs a sixteenth as wide, with random weights instead of downloaded ones."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **given: create(name, **SMALL, **given))
    monkeypatch.setattr(convert, "timm_model", lambda name, weights: create(name, **SMALL))


def test_every_link_leads_to_a_file_and_every_make_target_is_there():
    for name, text in TEXTS.items():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (ROOT / Path(name).parent / link).exists(), (name, link)
        for target in re.findall(r"(?m)(?:`|^)make ([a-z]+(?:-[a-z]+)?)\b", text):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (name, target)


@pytest.mark.slow
def test_the_program_of_the_readme_runs(random_weights, tmp_path, monkeypatch):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    (program,) = programs("README.md")
    names = {}
    exec(program, names)
    assert names["explanation"].heatmap.shape == (14, 14)
    assert Image.open("cat.png").size == Image.open("espresso.png").size


@pytest.mark.slow
@torch.no_grad()
def test_the_programs_of_the_library_page_run(random_weights, tmp_path, monkeypatch):
    """Of a backbone with random weights, which the shipped explainer would refuse; the others: tests/share."""
    shipped = SHIPPED / "vit_tiny_patch16_224.augreg_in21k_ft_in1k/anyhead/explainer.safetensors"
    own = read_weights(shipped)[0]["target"]
    monkeypatch.setattr(TargetModel, "backbone_identity", lambda self: own)
    (tmp_path / "photos").mkdir()
    for name in ("a.jpg", "b.jpg", "photos/c.jpg"):
        copy(ROOT / "docs/photos/cat_and_coffee.jpg", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    names = {"explainers": explainers}
    smaller = {'"photos/"': '"photos/", levels=3', "(4, ": "(1, ", "[0, 1, 2, 3]": "[0]"}
    for program in programs("docs/library.md", "py"):
        exec(reduce(lambda text, each: text.replace(*each), smaller.items(), program), names)
    assert names["comparison"].similarity == pytest.approx(1, abs=1e-4)
    assert names["everything"].shape == (1, 1000, 14, 14) and names["tasks"].shape == (1, 1, 14, 14)
    assert names["directions"].shape == (1, 2, 14, 14) and names["pixels"].shape == (1, 224, 224)


def test_the_program_that_serves_the_page_runs(monkeypatch):
    served = []
    monkeypatch.setattr(page, "serve", lambda *given, **options: served.append((given, options)))
    monkeypatch.setattr(explainers, "Session", lambda *given: given)
    for program in programs("docs/explain.md"):
        exec(program, {})
    (((model,),), options), *_ = served
    assert "vit_tiny" in model and options.keys() <= inspect.signature(serve).parameters.keys()


def programs(page, language="python"):
    """The blocks of Python on a page; `py` marks those that need more than the blocks before them."""
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[page], re.DOTALL)


@pytest.mark.slow
def test_the_notebook_runs(random_weights, monkeypatch):
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.delenv("WEIGHTS", raising=False)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells[1:]), "outputs are missing"
    assert not re.search(r"/(home|work|root|tmp|Users)/", NOTEBOOK.read_text()), "it names a folder of a machine"
    names = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert names["cat"].explained.name == "Egyptian cat" and 0 <= names["ranked"] <= 1
