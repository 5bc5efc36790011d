"""What a loss needs of a frozen model for a batch: computed in the training step, or once, and stored."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from explainers.target import TargetModel


class Source(Protocol):
    """Computes rows of a batch from its images.

    Modules name theirs in `sources`; the datamodule `Cached` stores the rows of each source separately.
    """

    @property
    def provides(self) -> tuple[str, ...]:
        """The names of all its rows."""
        ...

    @property
    def forward_passes(self) -> int:
        """Forward passes of the frozen model for each image."""
        ...

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        """Rows for `image`, uint8 (B, C, H, W), and `index` (B,): tensors of B rows."""
        ...

    def key(self) -> dict[str, str]:
        """Everything but the images that the rows of epoch 0 depend on."""
        ...


def complete(batch: dict[str, Tensor], sources: Sequence[Source], epoch: int = 0) -> dict[str, Tensor]:
    """The batch with the rows of all sources: a source of which any row is missing is computed."""
    for source in sources:
        if not all(row in batch for row in source.provides):
            batch = batch | source(batch, epoch)
    return batch


class Features:
    """The source of what a network reads of the frozen target, in one forward pass.

    Rows: `embedding` (B, D), and `map_0`, `map_1`, ... (B, N', C) of the blocks.

    Args:
        target: the frozen model.
        blocks: whose feature maps are rows; without any, the embeddings are all.
    """

    forward_passes = 1

    def __init__(self, target: TargetModel, blocks: Sequence[int] = ()) -> None:
        self.target, self.blocks = target, tuple(blocks)

    @property
    def provides(self) -> tuple[str, ...]:
        return "embedding", *(f"map_{i}" for i in range(len(self.blocks)))

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        normalised = self.target.normalise(batch["image"])
        with torch.no_grad():
            if not self.blocks:
                return {"embedding": self.target.embed(normalised)}
            embeddings, maps = self.target.embed_with_maps(normalised, self.blocks)
        return {"embedding": embeddings} | {f"map_{i}": value for i, value in enumerate(maps)}

    def key(self) -> dict[str, str]:
        return self.target.identity() | {"source": "tokens", "blocks": str(self.blocks)}


class Pixels:
    """The source of the images, for networks that read nothing of the target. Row: `image`, uint8 (B, C, H, W)."""

    provides = ("image",)
    forward_passes = 0

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        return {"image": batch["image"]}

    def key(self) -> dict[str, str]:
        return {"source": "pixels"}
