"""What `explainers` offers has types, is imported at first use, and needs the packages that setup.cfg declares."""

import subprocess
import sys
from pathlib import Path

import pytest

import explainers
from explainers import evaluation

ROOT = Path(__file__).parents[2]

RIGHT = """
from pathlib import Path

from torch import Tensor

import explainers
from explainers import Comparison, Explainer, Explanation, Session


def brightness(images: Tensor, classes: Tensor) -> Tensor:
    heatmaps: Tensor = images.float().mean(1)[:, ::16, ::16]
    return heatmaps


explainer: Explainer = brightness
explanation = explainers.explain("photo.jpg", "vit_tiny_patch16_224", method=brightness, top=3)
picture: Path = explanation.of("tabby").save("maps")
titles: list[str] = [each.title for each in explainers.explain(["a.jpg", Path("b")], "resnet50", classes=[1, "tabby"])]
comparison: Comparison = explainers.compare("a.jpg", "b.jpg", "resnet50", against=["c.jpg"])
found: list[Comparison] = explainers.nearest("a.jpg", "photos", "resnet50", k=3)
every: list[Explanation] = Session("resnet50", "GAE", batch_size=4).explain("photos", text="a cat")
names = [(each.name, each.bytes / 1e6) for each in explainers.available()]
result = explainers.evaluate("resnet50", {"brightness": brightness, "GAE": "GAE"}, "photos", classes=[3, "tabby"])
scores: Tensor = result.scores["GAE"]["fidelity_plus"]
"""

WRONG = {
    'explainers.explian("a", nonsense=3)': 'Module has no attribute "explian"',
    'explainers.explain("a.jpg", "resnet50", nonsense=3)': "No overload variant of",
    'titles = explainers.explain("a.jpg", "resnet50")': 'expression has type "Explanation", variable has type "list',
    'explainers.compare("a.jpg", "resnet50")': "No overload variant of",
    'explainers.explain("a.jpg", "resnet50").heatmaps': '"Explanation" has no attribute "heatmaps"',
    'explainers.evaluate("resnet50", {"GAE": 3}, "photos")': "Dict entry 0 has incompatible type",
    "from explainers import explian": 'Module "explainers" has no attribute "explian"',
}

CONFIG = """[mypy]
strict = true
follow_imports = silent
ignore_missing_imports = true
cache_dir = {cache}
mypy_path = {stubs}:{root}
[mypy-torch,torch.nn]
follow_imports = silent
[mypy-torch.*,huggingface_hub.*,tqdm.*,safetensors.*,timm.*,torchvision.*,transformers.*,matplotlib.*,torchmetrics.*,scipy.*,sklearn.*,captum.*,lightning.*,starlette.*,uvicorn.*]
follow_imports = skip
"""

STUBS = {
    "torch/__init__": "class device: ...\nclass Tensor:\n    def __getattr__(self, name: str) -> Any: ...",
    "torch/nn/__init__": "class Module: ...",
    "numpy": "class ndarray: ...",
    "PIL/__init__": "",
    "PIL/Image": "class Image: ...",
}
"""Stand for packages whose types take a minute to read."""


@pytest.mark.slow
def test_a_strict_type_checker_accepts_a_program_and_reports_every_mistake_in_it(tmp_path):
    pytest.importorskip("mypy")
    program, config = tmp_path / "program.py", tmp_path / "mypy.ini"
    program.write_text(RIGHT + "\n".join(WRONG))
    stubs = ROOT / ".mypy_cache/front_door_stubs"  # beside the cache, which is for files of this path
    for name, types in STUBS.items():
        file = stubs / f"{name}.pyi"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from typing import Any\n{types}\ndef __getattr__(name: str) -> Any: ...\n")
    config.write_text(CONFIG.format(cache=ROOT / ".mypy_cache/front_door", stubs=stubs, root=ROOT))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--hide-error-context", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    first = len(RIGHT.splitlines()) + 1
    said = {}
    for line in done.stdout.splitlines():
        if ": error: " in line:
            number, _, message = line.removeprefix("program.py:").partition(": error: ")
            said.setdefault(int(number) - first, []).append(message)
    assert said.keys() == set(range(len(WRONG))), done.stdout + done.stderr
    for number, expected in enumerate(WRONG.values()):
        assert any(expected in message for message in said[number]), (expected, said[number])


@pytest.mark.parametrize("package", [explainers, evaluation], ids=lambda package: package.__name__)
def test_every_public_name_is_there(package):
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_public_names_are_listed_and_others_refused():
    assert set(explainers.__all__) <= set(dir(explainers))
    with pytest.raises(AttributeError, match="module 'explainers' has no attribute 'explian'"):
        explainers.explian  # noqa: B018


def test_importing_it_imports_neither_torch_nor_timm():
    program = "import sys, explainers; print({'torch', 'timm', 'numpy', 'PIL'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"
