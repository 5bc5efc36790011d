"""The shipped explainer keeps its heatmap: golden numbers, on a backbone that needs no download."""

import timm
import torch
from conftest import wake

import explainers
from explainers.models import TargetModel
from explainers.saved.weights import read_weights, save_weights

GOLDEN = (
    *(0.108, 0.0022, -0.0393, -0.1123, 0.6145, 0.7109, -0.0813),
    *(0.146, -0.1295, 0.808, 0.6819, 0.1821, 0.0214, 0.3735),
)
"""Scores of the diagonal of patches for class 7, relative to the largest of the heatmap."""


def photo():
    """A smooth image without random numbers, uint8 (1, 3, 224, 224)."""
    rows, columns = torch.meshgrid(*[torch.linspace(0, 6, 224)] * 2, indexing="ij")
    waves = torch.stack([(rows * columns).sin(), (rows + 2 * columns).cos(), (3 * rows - columns).sin()])
    return ((waves + 1) * 127.5).to(torch.uint8)[None]


def test_the_shipped_explainer_gives_its_golden_heatmap(tmp_path):
    """It belongs to timm's weights of ViT-Tiny, which are not here: the copy's header names random ones instead."""
    target = TargetModel(wake(timm.create_model("vit_tiny_patch16_224")).eval())
    (shipped,) = (entry for entry in explainers.available() if entry.name.startswith("vit_tiny_patch16_224."))
    identity, weights = read_weights(shipped.folder / "explainer.safetensors")
    assert identity["target"].keys() == target.backbone_identity().keys()
    save_weights(weights, tmp_path / "explainer.safetensors", identity | {"target": target.backbone_identity()})

    heatmap = explainers.load(tmp_path, target)(photo(), torch.tensor([7]))[0]
    found = heatmap.diagonal() / heatmap.abs().max()
    torch.testing.assert_close(found, torch.tensor(GOLDEN), rtol=0, atol=2e-3)
