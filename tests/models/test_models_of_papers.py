"""Models of the papers and their relatives, small and with random weights: heatmaps and fidelity on their own grid."""

import numpy as np
import pytest
import references
import torch
from commands import composed
from conftest import wake
from hydra.utils import instantiate

from explainers import posthoc
from explainers.evaluation.evaluation import Evaluation

MODELS = {
    "eva_large": 56,
    "vit_base_patch8": 32,
    "deit_base_distilled": 64,
    "vit_base_patch14_dinov2.lvd142m": 56,
    "vit_giant_patch14_reg4_dinov2": 56,  # registers, SwiGLU, LayerScale
    "vit_small_patch16_dinov3": 64,  # rotary positions
}
SIZE = {"depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_explained_and_measured(name, tmp_path):
    """Fidelity by pixels is also computed by hand."""
    size = [f"++target.model.{key}={value}" for key, value in (SIZE | {"img_size": MODELS[name]}).items()]
    cfg = composed(f"target={name}", "target.model.pretrained=false", *size, folder=tmp_path, config="eval")
    target, grid = wake(instantiate(cfg.target)).eval(), instantiate(cfg.grid)
    assert grid == target.grid and grid.shape == (4, 4)
    methods = posthoc.build_all(["DecompX-SkipPLUS", "GAE"], target, grid)
    images = torch.randint(0, 256, (2, 3, *grid.size), dtype=torch.uint8)
    evaluation = Evaluation(grid, levels=3, removals=["zero", "drop"])(target, methods)
    batch = {"image": images, "label": torch.tensor([0, 4]), "index": torch.arange(2)}
    measured = evaluation.test_step(batch, 0)
    heatmaps, classes = measured["heatmaps"], measured["classes"].tolist()
    results, _ = evaluation.measurement.summarise()
    for name, row in results.items():
        assert heatmaps[name].shape == (2, 4, 4) and heatmaps[name].std() > 0
        assert 0 < abs(row["fidelity_plus_drop"]) < 1
        slow = [
            references.fidelity_curves(target.score_images, image, heatmap, image_class, 4, 3)[0]
            for image, heatmap, image_class in zip(target.normalise(images), heatmaps[name], classes, strict=True)
        ]
        assert row["fidelity_plus"] == pytest.approx(np.mean([references.area(curve, 16) for curve in slow]), abs=1e-4)
