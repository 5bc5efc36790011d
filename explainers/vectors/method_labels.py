"""Heatmaps of a method without training, as labels of a sweep."""

from typing import Any

import torch
from torch import Tensor

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc import build
from explainers.saved.identity import Identity, recipe


class MethodLabels:
    """A source (see `sources`) of the heatmaps of a method without training, for the predicted class of each image.

    As the reference of a sweep, it needs neither labels nor KernelSHAP. Its rows are those of `ShapleyLabels`:
    `explained` (B,) and `shapley` (B, N), here in the units of the method. They rank the points of a sweep by
    `rank_correlation` or `iou`; errors and factors in these units mean little.

    Args:
        model: the model to explain.
        grid: the patches that are explained.
        method: name of the method, see `posthoc.build`.
    """

    provides = ("explained", "shapley")
    entries = ("image",)
    classes = "predicted"

    def __init__(self, model: TargetModel, grid: PatchGrid, method: str = "DecompX-PLUS") -> None:
        model.check_grid(grid)
        self.model = model
        self.grid = grid
        self.method = method
        self.map: Any = build(method, model, grid)
        self.forward_passes = 1 + getattr(self.map, "forward_passes", 1)

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        with torch.no_grad():
            explained = self.model(batch["image"]).argmax(-1)
        return {"explained": explained, "shapley": self.map(batch["image"], explained).detach().flatten(1)}

    def key(self) -> Identity:
        own = {"source": f"heatmaps by {self.method}", "model": self.model.identity()}
        return recipe(self, without=own) | own
