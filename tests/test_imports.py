"""Imports go one way."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("explainers", "datamodules", "callbacks")
ALLOWED = {
    "__init__": set(),
    "masking": set(),
    "target": set(),
    "sampling": set(),
    "optimisation": set(),
    "augmentation": {"sampling"},
    "exchange": {"target"},
    "heads": {"target"},
    "task_arithmetic": set(),
    "networks": {"masking", "target"},
    "paper_network": {"masking", "networks", "target"},
    "meta_attribution": {"masking", "sampling", "target"},
    "metrics.perturbation": {"masking"},
    "metrics.agreement": set(),
    "metrics.localization": set(),
    "metrics.error_bound": set(),
}


def imports(path):
    """The dotted names of all modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import, which this test does not follow"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_of(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, folder
    return {path.relative_to(ROOT).as_posix(): imports(path) for path in files}


def packages(names):
    return {name.split(".")[0] for name in names}


def test_the_imports_of_a_file_are_seen():
    assert {"explainers.masking", "explainers.masking.PatchGrid", "torch", "lightning"} <= imports(
        ROOT / "explainers/tve.py"
    )


@pytest.mark.parametrize("module", ALLOWED)
def test_the_foundations_know_nothing_of_what_is_built_on_them(module):
    names = imports(ROOT / "explainers" / f"{module.replace('.', '/')}.py")
    allowed = {f"explainers.{name}" for name in ALLOWED[module]}
    foreign = {name for name in names if name.split(".")[0] in OURS}
    assert {name for name in foreign if not any(name == a or name.startswith(f"{a}.") for a in allowed)} == set()


def test_no_two_modules_need_each_other():
    modules = {file.removesuffix(".py").replace("/", "."): names for file, names in imports_of("explainers").items()}
    graph = {module: names & modules.keys() for module, names in modules.items()}
    assert "explainers.target" in graph["explainers.tve"]
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names them


def test_explainers_know_neither_data_nor_callbacks():
    assert [
        file for file, names in imports_of("explainers").items() if packages(names) & {"datamodules", "callbacks"}
    ] == []


def test_data_know_no_explainers_and_no_callbacks():
    assert [
        file for file, names in imports_of("datamodules").items() if packages(names) & {"explainers", "callbacks"}
    ] == []


def test_only_the_runs_of_a_config_know_hydra():
    knowing = {
        file
        for folder in OURS
        for file, names in imports_of(folder).items()
        if packages(names) & {"hydra", "omegaconf"}
    }
    assert knowing == {"explainers/runs.py"}


def test_no_module_of_ours_imports_the_entry_points_or_the_tests():
    entry_points = {"train", "eval", "tests", "references", "conftest"}
    assert [
        file for folder in OURS for file, names in imports_of(folder).items() if packages(names) & entry_points
    ] == []
