"""What README and docs say to type works."""

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

from explainers.conversion import convert
from explainers.tve import TVE

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text().replace("\\\n", " ") for path in PAGES}
NOTEBOOK = ROOT / "docs/tutorial.ipynb"
VARIABLES = {"d": "cifar10", "task": "imagenette"}  # of loops in the shell; all others hold options


def substituted(arguments):
    """A command without the variables of the shell and without what a reader fills in; of a sweep its first run.

    Interpolations of Hydra, such as ${data.domain}, stay.
    """
    variable = r"\$(?:\{(\w+)\}|(\w+))"
    arguments = re.sub(variable, lambda name: VARIABLES.get(name[1] or name[2], ""), arguments).replace("...", "")
    if "-m " in arguments:
        arguments = re.sub(r"(=[^\s,\[]+)(,[^\s,\]]+)+(?=\s|$)", r"\1", arguments)
    return arguments


COMMANDS = sorted(
    {
        (script, " ".join(substituted(arguments).split()))
        for text in TEXTS.values()
        for script, arguments in re.findall(r'python (train|eval)\.py ([^\n`#"]*)', text)
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
    overrides = [word for word in shlex.split(arguments) if word not in ("-m", "--cfg", "job")]
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


def test_the_second_program_of_the_readme_runs(random_weights, monkeypatch):
    """With an untrained explainer, and one image."""
    monkeypatch.setattr(TVE, "load", lambda self, path: None)
    _, second = programs("README.md")
    names = {}
    with torch.no_grad():
        exec(second.replace("(4, 3, 224, 224)", "(1, 3, 224, 224)"), names)
    assert names["heatmaps"].shape == (1, 14, 14)
    assert names["everything"].shape == (1, 1000, 14, 14) and names["tasks"].shape == (1, 1, 14, 14)


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
