"""What README and docs say to type works."""

import inspect
import json
import re
import shlex
from pathlib import Path
from shutil import copy

import pytest
import timm
import torch
from commands import ROOT, composed
from PIL import Image
from safetensors.torch import save_file

from explainers.app import page
from explainers.app.page import serve
from explainers.masking import PatchGrid
from explainers.models import TargetModel, convert
from explainers.saved.weights import read_weights
from explainers.share.catalogue import SHIPPED

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "docs").rglob("*.sh"),
]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text().replace("\\\n", " ") for path in PAGES}
NOTEBOOK = ROOT / "docs/tutorial.ipynb"
VARIABLES = {"d": "cifar10", "task": "imagenette"}  # of loops in the shell; all others hold options


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
MAKE = sorted({name for text in TEXTS.values() for name in re.findall(r"`?\bmake ([a-z]+(?:-[a-z]+)?)`?\b", text)})
LINKS = sorted(
    {(page, link) for page, text in TEXTS.items() for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}
)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments"), COMMANDS, ids=[f"{s} {a}"[:60] for s, a in COMMANDS])
def test_every_command_composes(script, arguments, tmp_path):
    overrides = [word for word in shlex.split(arguments) if word not in ("--cfg", "job")]
    assert composed(*overrides, folder=tmp_path, config=script)


def test_there_are_commands():
    assert {script for script, _ in COMMANDS} == {"train", "eval"} and len(COMMANDS) > 20


@pytest.mark.parametrize("target", [name for name in MAKE if name not in ("it", "them", "up")])
def test_every_make_target_is_there(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_every_link_leads_to_a_file(page, link):
    assert (ROOT / Path(page).parent / link).exists()


def test_every_picture_of_the_results_is_shown():
    shown = {Path(link).name for _, link in LINKS}
    assert {path.name for path in (ROOT / "docs").rglob("*.png")} <= shown


@pytest.fixture
def random_weights(monkeypatch):
    """timm's models with random weights instead of downloaded ones."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **settings: create(name, **settings))
    monkeypatch.setattr(convert, "timm_model", lambda name, weights: create(name))


def test_the_first_program_of_the_readme_runs(random_weights, tmp_path, monkeypatch):
    copy(ROOT / "docs/photos/cat_and_coffee.jpg", tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    first, _ = programs("README.md")
    names = {}
    exec(first, names)
    assert names["explanation"].heatmap.shape == (14, 14)
    assert Image.open("heatmap.png").size == Image.open("espresso.png").size


@torch.no_grad()
def test_the_second_program_of_the_readme_runs(random_weights, monkeypatch):
    """With one image, of a backbone with random weights, which the shipped explainer would refuse."""
    own = read_weights(SHIPPED / "vit_tiny_patch16_224.augreg_in21k_ft_in1k/anyhead/explainer.safetensors")[0]["target"]
    monkeypatch.setattr(TargetModel, "backbone_identity", lambda self: own)
    _, second = programs("README.md")
    names = {}
    exec(second.replace("(4, 3, 224, 224)", "(1, 3, 224, 224)"), names)
    assert names["heatmaps"].shape == (1, 14, 14)
    assert names["everything"].shape == (1, 1000, 14, 14) and names["tasks"].shape == (1, 1, 14, 14)


@torch.no_grad()
def test_the_programs_of_the_evaluation_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs/mine/results_scores.safetensors", "imagenet_val/{}/fidelity_minus", torch.tensor([0.1]))
    names = {
        "target": TargetModel(timm.create_model("vit_tiny_patch16_224", depth=2)),
        "PatchGrid": PatchGrid,
        "images": torch.zeros(1, 3, 224, 224, dtype=torch.uint8),
        "classes": torch.tensor([3]),
        "functionals": torch.rand(1, 2, 192),
    }
    for program in programs("docs/evaluation.md"):
        exec(program, names)
    assert names["directions"].shape == (1, 2, 14, 14) and names["pixels"].shape == (1, 224, 224)


def test_the_program_that_counts_corners_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    corners = torch.zeros(2, 1, 14, 14)
    corners[..., 0, 0] = 1
    write(tmp_path / "runs/benchmark/pictures/imagenet_val.safetensors", "heatmaps/{}", corners)
    counting, *others = programs("docs/results/benchmark.md")  # the others need real images
    exec(counting, {})
    for program in others:
        compile(program, "benchmark.md", "exec")
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == {"heatmaps/GAE", "heatmaps/DecompX-PLUS"} and float(lines["heatmaps/GAE"]) >= 0.25


def test_the_program_that_serves_the_page_runs(monkeypatch):
    pytest.importorskip("gradio")
    served = []
    monkeypatch.setattr(page, "serve", lambda *given, **options: served.append((given, options)))
    for program in programs("docs/page.md"):
        exec(program, {})
    ((model,), options), *_ = served
    assert "vit_tiny" in model and options.keys() <= inspect.signature(serve).parameters.keys()


def write(path, name, values):
    """Write a file of tensors as an evaluation does, the same for two explainers."""
    path.parent.mkdir(parents=True)
    save_file({name.format(explainer): values.clone() for explainer in ("GAE", "DecompX-PLUS")}, path)


def programs(page):
    """The blocks of Python on a page."""
    return re.findall(r"```python\n(.*?)```", TEXTS[page], re.DOTALL)


@pytest.mark.slow
def test_the_notebook_runs(random_weights, monkeypatch):
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.delenv("WEIGHTS", raising=False)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert names["cat"].explained.name == "Egyptian cat" and 0 <= names["ranked"] <= 1


def test_the_outputs_of_the_notebook_are_there_and_name_no_folder_of_a_machine():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells[1:])
    assert not re.search(r"/(home|work|root|tmp|Users)/", NOTEBOOK.read_text())
