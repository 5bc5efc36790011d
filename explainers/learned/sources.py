"""Sources: the outputs of frozen models that a loss needs, computed in every training step or read from a cache."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from explainers.errors import checks_choices
from explainers.models import TargetModel
from explainers.saved.identity import Identity, recipe
from explainers.transformer.direct_paths import record_direct
from explainers.transformer.path_flow import Paths, read_paths, record_flow
from explainers.transformer.recording import Record
from explainers.transformer.stage_paths import StageRecord, record_stage_paths


class Source(Protocol):
    """Computes rows of a batch, which are named tensors, from the images of the batch.

    A module lists its sources in its attribute `sources`. The datamodule `Cached` stores the rows of each source
    separately.
    """

    @property
    def provides(self) -> tuple[str, ...]:
        """Names of all its rows."""
        ...

    @property
    def entries(self) -> tuple[str, ...]:
        """Entries of a sample, such as `image` and `label`, that the rows depend on, besides its index."""
        ...

    @property
    def forward_passes(self) -> int:
        """Number of forward passes of the frozen model for each image."""
        ...

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        """Compute the rows of a batch, name → tensor (B, ...).

        Args:
            batch: holds `image`, uint8 (B, C, H, W), and `index`, the index of each image in the data set, (B,).
            epoch: number of the epoch, for sources with random draws.
        """
        ...

    def key(self) -> Identity:
        """Return everything that the rows of epoch 0 depend on, except the samples; a cache is valid for equal keys.

        The entry `source` is a short name for messages.
        """
        ...


class Loss(Source, Protocol):
    """What a training minimises: a source of the network's targets, and the error of its predictions."""

    ratios: int
    """1 for a mean over images, whatever the number of its terms; n if `compute` gives the mean of n ratios of sums."""

    def compute(self, predicted: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The error of a network's predictions, given the rows of this loss and of the network."""
        ...

    def compute_sums(self, predicted: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        """Numerators and denominators of `compute`, (ratios,) each or numbers; those of several batches are added."""
        ...


class MeanLoss:
    """What is the same in every `Loss` that is a mean over images."""

    ratios = 1

    def compute_sums(self: Loss, predicted: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, int]:
        return self.compute(predicted, rows) * len(predicted), len(predicted)


def complete(batch: dict[str, Tensor], sources: Sequence[Source], epoch: int = 0) -> dict[str, Tensor]:
    """Return the batch with the rows of all sources. A source is computed if any of its rows is missing.

    >>> complete({"image": torch.zeros(1, 3, 2, 2), "embedding": torch.ones(1, 4)}, [Pixels()]).keys()
    dict_keys(['image', 'embedding'])
    """
    for source in sources:
        if not all(row in batch for row in source.provides):
            batch = batch | source(batch, epoch)
    return batch


class Features:
    """The source of the outputs of a frozen target, from one forward pass.

    Rows: `embedding` (B, D), a feature map `map_0`, `map_1`, ... (B, N', C) of each of `blocks`, and `direct`
    (B, L, N', D), the paths of the L blocks `direct`.

    Args:
        target: the frozen model.
        blocks: indices of the blocks whose feature maps are rows.
        direct: indices of the blocks whose paths are a row, or of the stages.
        paths: `direct` for `direct_paths`; `flow` for `path_flow`, of the last blocks; `stages` for `stage_paths`.
    """

    entries = ("image",)
    forward_passes = 1

    @checks_choices
    def __init__(
        self, target: TargetModel, blocks: Sequence[int] = (), direct: Sequence[int] = (), paths: Paths = "direct"
    ) -> None:
        self.target = target
        self.blocks = tuple(blocks)
        self.direct = tuple(direct)
        self.paths = paths

    @property
    def provides(self) -> tuple[str, ...]:
        return "embedding", *(f"map_{i}" for i in range(len(self.blocks))), *(("direct",) if self.direct else ())

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        rows, record = self.read(batch["image"])
        return rows if record is None else rows | {"direct": read_paths(self.target, record)}

    @torch.no_grad()
    def read(self, images: Tensor) -> tuple[dict[str, Tensor], Record | StageRecord | None]:
        """Compute all rows of uint8 images (B, C, H, W) but `direct`, which a few functionals do not need.

        Returns:
            The rows, and the record of the pass for `read_paths`; `None` without blocks `direct`.
        """
        normalised = self.target.normalise(images)
        if not self.direct:
            return self._rows(normalised), None
        if self.paths == "stages":
            embeddings, maps, stages = record_stage_paths(self.target, normalised, self.direct, self.blocks)
            return name_rows(embeddings, maps), stages
        record_blocks = record_flow if self.paths == "flow" else record_direct
        with record_blocks(self.target, self.direct) as record:
            rows = self._rows(normalised)
        return rows, record

    def _rows(self, normalised: Tensor) -> dict[str, Tensor]:
        """The embeddings and feature maps."""
        if not self.blocks:
            return {"embedding": self.target.embed(normalised)}
        return name_rows(*self.target.embed_with_maps(normalised, self.blocks))

    def key(self) -> Identity:
        own: Identity = {"source": "features", "target": self.target.backbone_identity()}
        return own | recipe(self, without=own)


def name_rows(embeddings: Tensor, maps: Sequence[Tensor]) -> dict[str, Tensor]:
    """Embeddings and feature maps by the names of their rows."""
    return {"embedding": embeddings} | {f"map_{i}": value for i, value in enumerate(maps)}


class Pixels:
    """The source of the images, for networks that use no output of the target. Row: `image`, uint8 (B, C, H, W)."""

    provides = ("image",)
    entries = ("image",)
    forward_passes = 0

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        return {"image": batch["image"]}

    def key(self) -> Identity:
        return {"source": "pixels"}


def network_inputs(target: TargetModel, blocks: Sequence[int]) -> Source:
    """The source of a network's inputs: features of the target for a network with blocks, otherwise the pixels."""
    return Features(target, blocks) if blocks else Pixels()
