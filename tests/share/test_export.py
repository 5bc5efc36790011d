"""Learned explainers as graphs: torch.export and ONNX, for any number of images."""

import re
from functools import partial

import pytest
import torch
from clips import image_tower
from commands import ROOT
from conftest import wake
from toys import VECTORS

from explainers.anyhead import AnyHead

IMAGES = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


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
