"""The interface of networks that predict meta-attributions: the light one and the paper's."""

from typing import Protocol

from torch import Tensor


class MetaNetwork(Protocol):
    """Predicts the meta-attributions (g, h) of all patches in one forward pass.

    A network keeps its constructor arguments as attributes of the same names. They are written with its weights, and
    compared when these are loaded.
    """

    blocks: tuple[int, ...]
    """Blocks of the target whose feature maps it reads; none for a network that reads images only."""

    def __call__(
        self, images: Tensor | None, embeddings: Tensor | None, maps: list[Tensor], patches: Tensor | None = None
    ) -> Tensor:
        """Predict meta-attributions.

        Args:
            images: uint8, (B, C, H, W); `None` if the cache stores features only.
            embeddings: embeddings of the whole images, (B, D); `None` for a network without `blocks`.
            maps: feature maps of the `blocks`, (B, N', C) each.
            patches: indices of the patches to predict, (B, Z); `None` for all N.

        Returns:
            (B, N, 2, D), or (B, Z, 2, D) for given `patches`.
        """
        ...

    def calibrate(self, meta: Tensor, embedding: Tensor) -> None:
        """Prepare for the scale of the data, before the first training step.

        Args:
            meta: exact meta-attributions (g, h) of the first training batch, (B, Z, 2, D).
            embedding: embeddings of its images, (B, D).
        """
        ...
