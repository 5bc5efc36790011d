"""Learned and post-hoc explainers of vision models.

Letters used for tensor shapes in every file of this project:

    B images   C channels   H, W pixels   P patches per side   N = P·P patches   Z sampled patches per image
    D embedding width   K classes   M masks per image   L levels of sparsity

`images` are uint8, (B, C, H, W): every model normalises them for itself. `keep` is boolean, (B, M, N), and True means
that the patch stays visible. Patches are numbered row by row.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Explainer(Protocol):
    """What every explainer is, learned or not: a function from images and classes to heatmaps."""

    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain `classes` (B,) in `images`, uint8 (B, C, H, W), with heatmaps (B, P, P): higher is more important."""
        ...


class Source(Protocol):
    """What a loss needs of a frozen model for a batch: computed in the training step, or once, and stored.

    Modules name theirs in `sources`; the datamodule `Attributions` stores the rows of each by itself.
    """

    provides: str
    """One of its rows: a batch that holds it needs no computing."""

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        """Rows for `image`, uint8 (B, C, H, W), and `index` (B,): tensors of B rows."""
        ...

    def key(self) -> dict[str, str]:
        """Everything but the images that the rows of epoch 0 depend on."""
        ...


def complete(batch: dict[str, Tensor], sources: Sequence[Source], epoch: int = 0) -> dict[str, Tensor]:
    """The batch with the rows of all sources: those that it does not hold are computed."""
    for source in sources:
        if source.provides not in batch:
            batch = batch | source(batch, epoch)
    return batch
