"""Explaining any functional as a graph of two inputs, images and functionals, for torch.export and ONNX."""

from typing import Any

import torch
from torch import Tensor, nn

from explainers import VectorExplainer
from explainers.errors import InputError


class FunctionalGraph(nn.Module):
    """Explains functionals v of images by the vectors of an explainer; nothing depends on the number of either.

    `AnyHead.explain` chooses by the number of functionals what is faster, which a graph cannot.

    Args:
        explainer: an explainer with vectors c_z of patches, such as AnyHead.

    Raises:
        InputError: for an explainer without vectors, or one that refines them by masked passes.
    """

    def __init__(self, explainer: Any) -> None:
        super().__init__()
        if not isinstance(explainer, VectorExplainer):
            raise InputError(
                f"expected an explainer with vectors of patches, such as AnyHead, got {type(explainer).__name__}"
            )
        passes = getattr(explainer, "refine", 0)
        if passes:
            raise InputError(f"expected an explainer of one pass, got refine={passes}: take refine=0")
        self.explainer: Any = explainer

    def forward(self, images: Tensor, functionals: Tensor) -> Tensor:
        """Explain functionals (B, V, D) of the embedding in uint8 images (B, C, H, W): heatmaps (B, V, P, P)."""
        vectors, _ = self.explainer.decompose(images)
        with torch.autocast(images.device.type, enabled=False):
            heatmaps = functionals.float() @ vectors.float().mT
        side = self.explainer.grid.side
        return heatmaps.unflatten(-1, (side, side))
