"""Learned explainers as graphs: torch.export and ONNX, for any number of images."""

import re
from functools import partial

import pytest
import torch
from commands import ROOT
from conftest import timm_model, wake
from toys import LIGHT, VECTORS

from explainers.anyhead import AnyHead
from explainers.masking import PatchGrid
from explainers.target import TargetModel
from explainers.tve import TVE

IMAGES = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
CLASSES = torch.tensor([4, 0, 2])


def lively(kind, network):
    target = TargetModel(timm_model(depth=1)).eval()
    explainer = kind(target, PatchGrid(32, 8), partial(network, blocks=[0])).eval().requires_grad_(False)
    wake(explainer.network)
    return explainer


@pytest.mark.slow
@pytest.mark.parametrize("paths", ["direct", "flow"])
def test_the_graph_of_our_own_explainer_with_paths_serves_any_number_of_images(paths):
    explainer, batch = lively(AnyHead, partial(VECTORS, direct=[0], paths=paths)), {0: torch.export.Dim("batch")}
    graph = torch.export.export(explainer, (IMAGES, CLASSES), dynamic_shapes=(batch, batch)).module()
    for count in (1, 3):
        classes = CLASSES.flip(0)[:count]
        torch.testing.assert_close(graph(IMAGES[:count], classes), explainer(IMAGES[:count], classes))


@pytest.mark.slow
def test_the_onnx_example_of_the_library_page_explains_predictions_as_torch_does(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    explainer = lively(TVE, LIGHT)
    *_, example = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    names = {"torch": torch, "explainer": explainer, "images": IMAGES}
    exec(example, names)
    session = onnxruntime.InferenceSession("explainer.onnx")
    for count in (1, 3):
        images, expected = IMAGES[:count].flip(-1), explainer(IMAGES[:count].flip(-1))
        torch.testing.assert_close(names["program"].module()(images), expected)
        (found,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)
