"""Learned explainers as graphs: torch.export and ONNX, for any number of images."""

import re
from functools import partial

import pytest
import torch
from clips import image_tower
from commands import ROOT
from conftest import timm_model, wake
from toys import LIGHT, VECTORS

from explainers.anyhead import AnyHead
from explainers.models import TargetModel
from explainers.tve import TVE

IMAGES = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
CLASSES = torch.tensor([4, 0, 2])


@pytest.mark.slow
def test_graphs_of_predictions_and_of_given_classes_serve_any_number_of_images():
    """The first is that of the library page, before its last line, which writes ONNX as the next example does."""
    target, batch = TargetModel(timm_model(depth=1)).eval(), {0: torch.export.Dim("batch")}
    explainer = TVE(target, target.grid, partial(LIGHT, blocks=[0])).eval().requires_grad_(False)
    wake(explainer.network)
    *_, example, other = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    *lines, last = example.splitlines()
    assert last.replace("explainer.onnx", "functionals.onnx") == other.splitlines()[-1]
    names = {"torch": torch, "explainer": explainer, "images": IMAGES}
    exec("\n".join(lines), names)
    of_classes = torch.export.export(explainer, (IMAGES, CLASSES), dynamic_shapes=(batch, batch)).module()
    for count in (1, 3):
        images, classes = IMAGES[:count].flip(-1), CLASSES.flip(0)[:count]
        torch.testing.assert_close(names["program"].module()(images), explainer(images))
        torch.testing.assert_close(of_classes(images, classes), explainer(images, classes))


@pytest.mark.slow
def test_the_onnx_graph_of_a_tower_explains_one_functional_and_500(tmp_path, monkeypatch):
    """Also of 500, more than the width of the embedding, which torch explains in another way than one."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    target, network = image_tower(depth=1), partial(VECTORS, blocks=[0], direct=[0], paths="flow")
    explainer = AnyHead(target, target.grid, network, blend=0.5).eval().requires_grad_(False)
    wake(explainer.network)
    *_, example = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    names = {"torch": torch, "explainer": explainer, "images": IMAGES, "batch": torch.export.Dim("batch")}
    exec(example, names)
    session = onnxruntime.InferenceSession("functionals.onnx")
    for count, several in ((1, 1), (2, 500), (3, 1)):
        images, functionals = IMAGES[:count].flip(-1), torch.randn(count, several, 24)
        expected = explainer.explain(images, functionals)
        torch.testing.assert_close(names["program"].module()(images, functionals), expected, rtol=1e-4, atol=1e-4)
        (found,) = session.run(None, {"images": images.numpy(), "functionals": functionals.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-3)
