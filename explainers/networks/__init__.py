"""Networks that predict what an explainer needs of every patch, from what the frozen target saw or from the pixels.

A network has `blocks`, the feature maps of the target that it reads; with none, it sees the images alone and needs no
forward pass of the target. Those that predict meta-attributions have the interface `MetaNetwork`; those that predict
Shapley values are called as `network(images, embeddings, maps)` and return (B, N, K).
"""

from typing import Protocol

from torch import Tensor

from explainers.networks.light import LightNetwork
from explainers.networks.paper import PaperNetwork
from explainers.networks.shapley import FastSHAPNetwork, LightShapleyNetwork, ViTShapleyNetwork

__all__ = ["FastSHAPNetwork", "LightNetwork", "LightShapleyNetwork", "MetaNetwork", "PaperNetwork", "ViTShapleyNetwork"]


class MetaNetwork(Protocol):
    """Predicts the meta-attribution (g, h) of every patch at once."""

    blocks: tuple[int, ...]

    def __call__(
        self, images: Tensor | None, embeddings: Tensor | None, maps: list[Tensor], patches: Tensor | None = None
    ) -> Tensor:
        """Meta-attributions (B, N, 2, D), or in training only those of the patches (B, Z) that were drawn.

        Args:
            images: uint8, (B, C, H, W); `None` where only features are stored.
            embeddings: of whole images, (B, D); `None` for a network without blocks.
            maps: feature maps of the `blocks`, (B, N', C) each.
            patches: which ones to predict, (B, Z); by default all.
        """
        ...

    def calibrate(self, meta: Tensor, embedding: Tensor) -> None:
        """See a first training batch, (B, Z, 2, D) and (B, D), before the first step; to set units, for example."""
        ...
