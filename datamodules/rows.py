"""Data sets for caching: the images whose rows must be computed, and the stored rows that replace images."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.datasets import Sample
from datamodules.loaders import collate
from datamodules.store import CORRUPT, WRITTEN, Rows, Store
from explainers.errors import InputError


class Numbered(Dataset[tuple[int, Sample | None]]):
    """(Position, sample) of some samples of a data set; the sample is None if it is corrupt.

    Args:
        samples: the data set.
        positions: positions of the chosen samples in it.
    """

    def __init__(self, samples: Any, positions: Sequence[int]) -> None:
        self.samples = samples
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> tuple[int, Sample | None]:
        return self.positions[index], self.samples[self.positions[index]]


def readable_and_corrupt(samples: list[tuple[int, Sample | None]]) -> tuple[dict[str, Tensor] | None, list[int]]:
    """Stack the readable samples to a batch, None if there are none, and list the positions of the corrupt ones.

    >>> readable_and_corrupt([(4, {"index": 4}), (6, None)])
    ({'index': tensor([4])}, [6])
    """
    corrupt = [position for position, sample in samples if sample is None]
    return collate([sample for _, sample in samples]), corrupt


class StoredRows(Dataset[Rows]):
    """Samples that combine one row of every store. Corrupt images have no rows and are not among the samples.

    `rows` are the positions of the samples in the data set, and `corrupt` are the positions of the corrupt images.

    Args:
        stores: one store for each source, all of the same data set, and completely filled.
        labels: class of every image of the data set, int64; `None` if there are no labels.

    Raises:
        InputError: if a store lacks the row of an image that is not corrupt, or if all images are corrupt.
    """

    def __init__(self, stores: Sequence[Store], labels: Tensor | None) -> None:
        states = np.stack([store.done for store in stores])
        written = (states == WRITTEN).all(0)
        corrupt = (states == CORRUPT).any(0)
        for store, state in zip(stores, states, strict=True):
            missing = int(((state != WRITTEN) & ~corrupt).sum())
            if missing:
                raise InputError(
                    f"expected rows of {store.size} images in {store.path}, got no row for {missing} of them; delete"
                    " that folder, and its rows are computed again"
                )
        if not written.any():
            raise InputError(
                f"expected at least 1 readable image, got {len(written)} that are all corrupt; repair or replace them"
            )
        self.stores = stores
        self.labels = labels
        self.rows = np.flatnonzero(written).tolist()
        self.corrupt = np.flatnonzero(~written).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Rows:
        row = self.rows[index]
        sample = {"index": torch.tensor(row)} | ({} if self.labels is None else {"label": self.labels[row]})
        for store in self.stores:
            sample |= store.read(row)
        return sample
