"""What `pip install` installs: the library alone, with its pages, its shipped explainers, its types and its command."""

import importlib
import os
import re
import sys
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
from commands import ROOT
from fork_server import fork, join

import explainers


def build(folder):
    """Build a wheel of the sources in a folder, in a fork."""
    os.chdir(folder)
    sys.argv = ["setup.py"]
    for name in [name for name in sys.modules if name.split(".")[0] in ("setuptools", "distutils")]:
        del sys.modules[name]  # FFCV imports a part of them
    importlib.import_module("setuptools.build_meta").build_wheel("built")


def use(folder, path):
    """Import the library from `path` in a fork that runs in `folder`; write down version, a function, and the file."""
    os.chdir(folder)
    sys.path.insert(0, str(path))
    for name in [name for name in sys.modules if name.split(".")[0] == "explainers"]:
        del sys.modules[name]
    library = importlib.import_module("explainers")
    Path("used").write_text("\n".join([library.__version__, library.load.__name__, library.__file__]))


@pytest.mark.slow
def test_a_wheel_holds_the_library_alone_and_is_imported_elsewhere(tmp_path):
    source, installed = tmp_path / "source", tmp_path / "installed"
    copytree(ROOT / "explainers", source / "explainers", ignore=ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    for name in (
        "shipped/test_vit.r160_in1k/anyhead/explainer.safetensors",
        "app/page/page.css",
        "report/page/page.js",
    ):
        path = source / "explainers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    join(fork(build, source))
    (wheel,) = (source / "built").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)

    files = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    library = {path.relative_to(source) for path in (source / "explainers").rglob("*") if path.is_file()}
    library = {path for path in library if path.parts[1] != "running"}
    assert library == {path for path in files if not path.parts[0].endswith(".dist-info")}
    (commands,) = installed.glob("*.dist-info/entry_points.txt")
    assert "explainers = explainers.app.command:main" in commands.read_text()
    join(fork(use, tmp_path, installed))
    used = (tmp_path / "used").read_text().splitlines()
    assert used == [explainers.__version__, "load", str(installed / "explainers/__init__.py")]


def test_the_citation_and_the_changelog_name_the_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    released = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited[1] == released[0] == explainers.__version__
