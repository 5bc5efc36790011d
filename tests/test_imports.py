"""Imports go one way: the table of rooms in CONTRIBUTING.md is their order."""

import ast
import configparser
import graphlib
import json
import re
import sys
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path

from fork_server import fork, join

ROOT = Path(__file__).parents[1]
OURS = ("explainers", "datamodules", "callbacks")
FILES = sorted(path.relative_to(ROOT) for folder in OURS for path in (ROOT / folder).rglob("*.py"))
LIBRARY = [path for path in FILES if path.parts[0] == "explainers"]

ROOMS = {(path.with_suffix("") if len(path.parts) == 2 else path).parts[1] for path in LIBRARY}


def order_of_rooms():
    """Room → its line in the table."""
    lines = re.findall(r"^\| ((?:`\w+` ?)+)\|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {room: number for number, line in enumerate(lines) for room in re.findall(r"`(\w+)`", line)}


@cache
def imports(path):
    """The dotted names of all modules that a file imports, wherever in the file.

    Packages name for type checkers what they import at first use, which does not count.
    """
    found = set()
    tree = ast.parse((ROOT / path).read_text())
    if path.name == "__init__.py":
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(getattr(node, "test", node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import, which this test does not follow"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Dict):  # {"_target_": "explainers.tve.TVE"} is built, so it needs that room as well
            entries = zip(node.keys, node.values, strict=True)
            found |= {value.value for key, value in entries if is_text(key, "_target_") and is_text(value)}
    return found


def is_text(node, text=None):
    """Whether a node of the syntax tree is a string, or this string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and text in (None, node.value)


def rooms_of(path):
    """The rooms of the library that a file imports from."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("explainers.")} & ROOMS


def packages(path):
    return {name.split(".")[0] for name in imports(path)}


def test_the_table_names_every_room_and_no_other():
    names = {path.parts[1].removesuffix(".py") for path in LIBRARY}
    assert set(order_of_rooms()) == names - {"__init__"}


def test_files_import_only_from_their_own_room_and_from_rooms_above_it_in_the_table():
    order, wrong = order_of_rooms(), []
    for path in LIBRARY:
        own = path.parts[1].removesuffix(".py")
        below = {room for room in rooms_of(path) if room != own and order[room] >= order.get(own, -1)}
        wrong += [f"{path} imports from {', '.join(sorted(below))}"] if below else []
    assert wrong == []


def test_no_two_modules_need_each_other():
    modules = {
        path.as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", "."): imports(path)
        for path in LIBRARY
    }
    graph = {module: names & modules.keys() for module, names in modules.items()}
    assert "explainers.models" in graph["explainers.tve.tve"]
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names them


MAY_KNOW = {
    "explainers": ("explainers",),
    "datamodules": (
        *("explainers.errors", "explainers.saved.files", "explainers.saved.records", "explainers.saved.identity"),
        *("explainers.runtime.progress", "explainers.images", "explainers.models"),  # what a model is shown
    ),
}
MAY_KNOW["callbacks"] = (
    *MAY_KNOW["datamodules"],
    *("explainers.evaluation", "explainers.report.heatmap_figure", "explainers.report.pictures"),
    "explainers.running.signals",
)
"""Folder → what its files may import of our code, beside the folder itself."""


def test_the_library_knows_nothing_of_the_other_folders_which_know_little_of_it():
    """Neither the laboratory, data, callbacks and programs, nor the runner, which is last in the table."""
    assert [*order_of_rooms()][-1] == "running"
    ours, wrong = {*OURS, "benchmarks", "tests", "references", "conftest", "train", "eval"}, []
    for path in FILES:
        known = {name for name in imports(path) if name.split(".")[0] in ours - {path.parts[0]}}
        wrong += [f"{path} imports {name}" for name in known if not name.startswith(MAY_KNOW[path.parts[0]])]
    assert wrong == []


def test_only_what_the_entry_points_share_knows_hydra():
    knowing = [path.as_posix() for path in FILES if packages(path) & {"hydra", "omegaconf"}]
    assert knowing and all(path.startswith("explainers/running/") for path in knowing)


EXTRAS = {
    *("lightning", "torchmetrics", "captum", "sklearn", "scipy", "matplotlib"),
    *("hydra", "omegaconf", "wandb", "starlette", "uvicorn", "transformers"),
}
"""Packages that an installation without extras lacks."""

WITH_EXTRAS = (
    *("evaluation", "running", "vectors", "report", "app.page", "app.evaluating", "share.adapters"),
    *("shapley.surrogate", "training.classifier", "training.training_module"),
)
"""Rooms and modules of the library that need them, without `report.overlays`."""


NAMES_ON_PYPI = {"PIL": "pillow", "yaml": "pyyaml"}
"""Package → its distribution, where they differ."""


def test_what_the_core_imports_is_declared():
    """Explaining images works after `pip install` without extras, whatever other packages happen to bring along."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = set(re.findall(r"^([\w-]+)", config["options"]["install_requires"], re.MULTILINE))
    without = tuple(f"explainers/{name.replace('.', '/')}" for name in WITH_EXTRAS)
    drawing = ("explainers/report/overlays", "explainers/report/side_by_side")
    needed = set()
    for path in LIBRARY:
        if path.as_posix().startswith(drawing) or not path.as_posix().startswith(without):
            for node in ast.parse((ROOT / path).read_text()).body:  # at the top, where nothing asks whether it is there
                named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                named += [node.module] if isinstance(node, ast.ImportFrom) else []
                needed |= {name.split(".")[0] for name in named}
    needed -= {*sys.stdlib_module_names, "explainers"}
    assert {NAMES_ON_PYPI.get(package, package) for package in needed} == declared


class WithoutExtras:
    """Finds what the finders of Python find, except these packages."""

    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in EXTRAS:
            return next(filter(None, (finder.find_spec(name, path, target) for finder in self.finders)), None)

    def find_distributions(self, context):
        """The versions of installed packages, which some ask for when they are imported."""
        return chain.from_iterable(
            finder.find_distributions(context) for finder in self.finders if hasattr(finder, "find_distributions")
        )


def explain_without_extras(path):
    """Write down what an installation without extras does: heatmaps, a picture, what it says if a method needs more."""
    for name in [name for name in sys.modules if name.split(".")[0] in {"explainers", *EXTRAS}]:
        del sys.modules[name]
    sys.meta_path[:] = [WithoutExtras([*sys.meta_path])]
    names = [path.with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".") for path in LIBRARY]
    wanting = tuple(f"explainers.{name}." for name in WITH_EXTRAS)
    for name in ["explainers.report.overlays", *(name for name in names if not f"{name}.".startswith(wanting))]:
        import_module(name)

    import timm
    import torch

    from explainers import overlay, posthoc
    from explainers.anyhead import AnyHead, AnyHeadNetwork
    from explainers.errors import InputError
    from explainers.models import TargetModel
    from explainers.share.pretrained import _find_class

    target = TargetModel(timm.create_model("test_vit", num_classes=3).eval())
    images = torch.randint(0, 256, (1, 3, 160, 160), dtype=torch.uint8)
    anyhead = AnyHead(target, target.grid, lambda *model: AnyHeadNetwork(*model, blocks=[0], width=8, depth=1)).eval()
    heatmaps = [anyhead(images), posthoc.build("DecompX-SkipPLUS", target, target.grid)(images, torch.tensor([1]))]
    said = []
    for call in (
        lambda: posthoc.DeepLift(target, target.grid),
        lambda: posthoc.ViTCX(target, target.grid)(images, torch.tensor([1])),
        lambda: _find_class("SelfExplaining", "model.safetensors"),
        lambda: import_module("explainers.metrics.agreement").RankCorrelation(),
    ):
        try:
            call()
        except InputError as error:
            said.append(str(error))
    picture = overlay(images[0], heatmaps[0][0])
    path.write_text(json.dumps([[each.shape for each in heatmaps], picture.shape, said]))


def test_images_are_explained_without_extras(tmp_path):
    join(fork(explain_without_extras, tmp_path / "said.json"))
    heatmaps, picture, said = json.loads((tmp_path / "said.json").read_text())
    assert heatmaps == [[1, 10, 10]] * 2 and picture == [3, 160, 160]
    line = "expected {} for {}, got an installation without it: pip install 'transferable-explainers[{}]'"
    assert said == [
        line.format("captum", "DeepLift", "methods"),
        line.format("sklearn", "ViTCX", "methods"),
        line.format("lightning", "SelfExplaining", "train"),
        line.format("torchmetrics", "RankCorrelation", "methods"),
    ]
