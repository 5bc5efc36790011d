"""What `pip install` installs: the library alone, with the files of its gallery and its types."""

import os
import re
import subprocess
import sys
import zipfile
from shutil import copy, copytree, ignore_patterns

import pytest
from commands import ROOT

import explainers

BUILD = "from setuptools.build_meta import build_wheel; build_wheel('built')"
USE = "import explainers; print(explainers.__version__, explainers.load.__name__, explainers.__file__)"


def python(code, folder, path):
    """What a program prints that runs in `folder` and finds modules in `path` first."""
    environment = os.environ | {"PYTHONPATH": str(path)}
    command = [sys.executable, "-W", "ignore", "-P", "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, check=True, text=True, capture_output=True).stdout


@pytest.mark.slow
def test_a_wheel_holds_the_library_alone_and_is_imported_elsewhere(tmp_path):
    source, installed, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    copytree(ROOT / "explainers", source / "explainers", ignore=ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    python(BUILD, source, path="")
    (wheel,) = (source / "built").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)

    files = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    library = {path.relative_to(source) for path in (source / "explainers").rglob("*") if path.is_file()}
    assert library == {path for path in files if not path.parts[0].endswith(".dist-info")}
    printed = python(USE, elsewhere, path=installed).split()
    assert printed == [explainers.__version__, "load", str(installed / "explainers/__init__.py")]


def test_the_citation_and_the_changelog_name_the_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    released = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited[1] == released[0] == explainers.__version__
