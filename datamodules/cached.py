"""Stores the inputs of a loss that come from the frozen target: computed in the first run, read in later runs."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from datamodules.datasets import Sample
from datamodules.images import Images, collate, rank_and_world_size
from datamodules.store import Rows, Store
from explainers.errors import InputError

LONG = 50_000
"""Forward passes that are announced before they start: minutes, on a CPU."""


class StoredRows(Dataset[Rows]):
    """Samples that combine one row of every store. Corrupt images have no rows and are not among the samples.

    Args:
        stores: one store per source, all of the same data set and completely filled.
        labels: class of every image of the data set, int64 (N,); `None` if there are no labels.
    """

    def __init__(self, stores: Sequence[Store], labels: Tensor | None) -> None:
        self.stores, self.rows, self.labels = stores, stores[0].present(), labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Rows:
        row = self.rows[index]
        sample = {"index": torch.tensor(row)} | ({} if self.labels is None else {"label": self.labels[row]})
        for store in self.stores:
            sample |= store.read(row)
        return sample


def collate_readable(samples: list[Sample | None]) -> dict[str, Tensor] | None:
    """Stack the readable samples; None if all are corrupt.

    Rows of corrupt images stay missing from a store, so a later run may meet batches of corrupt images only.

    >>> collate_readable([None, None]) is None
    True
    """
    return collate(samples) if any(sample is not None for sample in samples) else None


class Cached(LightningDataModule):
    """Replaces the pixels in the batches of `Images` by the outputs of the training module's `sources`.

    The first run computes these rows and shows a progress bar. If it is killed, the next run computes only the missing
    rows. Later runs with the same sources, images and precision only read them. Every source has a store of its own, so
    two runs share the stores of the sources that they share. Images are not cropped at random.

    Args:
        images: loads the images.
        folder: folder of all stores.
        batch_size: images per batch while the rows are computed.

    Raises:
        InputError: if `images` is another datamodule than `Images`, such as `FFCV`.
    """

    def __init__(self, images: Images, folder: str, batch_size: int = 16) -> None:
        super().__init__()
        if not isinstance(images, Images):
            raise InputError(
                f"expected loaders of image files to cache rows of, got {type(images).__name__}: take other data, such"
                " as data=imagenet_folder, or cache=none"
            )
        self.images, self.folder, self.batch_size = images, folder, batch_size

    @property
    def classes(self) -> list[str]:
        """See `Images`."""
        return self.images.classes

    @property
    def num_workers(self) -> int:
        """See `Images`."""
        return self.images.num_workers

    def dataset(self, split: str) -> Any:
        """The images of a split."""
        return self.images.dataset(split)

    def setup(self, stage: str | None = None) -> None:
        """Find the images, so that a wrong path is reported before anything is computed."""
        self.images.trainer = self.trainer
        self.images.setup(stage)

    def train_dataloader(self) -> DataLoader:
        return self.images.training_loader(self._rows("train"))

    def val_dataloader(self) -> DataLoader:
        return self.images.evaluation_loader(self._rows("val"))

    def test_dataloader(self) -> DataLoader:
        return self.images.evaluation_loader(self._rows("test"))

    def _rows(self, split: str) -> Dataset:
        """The rows of all readable images of a split; computes the missing ones first."""
        trainer: Any = self.trainer
        if trainer.fast_dev_run:
            return self.dataset(split)  # the module computes the rows of these few images itself
        stores = [self._filled(source, split) for source in trainer.lightning_module.sources]
        return StoredRows(stores, getattr(self.dataset(split), "labels", None))

    def _filled(self, source: Any, split: str) -> Store:
        """The completely filled store of a source; every process computes its share of the missing rows."""
        trainer: Any = self.trainer
        dataset, (rank, world_size) = self.dataset(split), rank_and_world_size(self)
        key = source.key() | {"images": dataset.fingerprint(), "precision": str(trainer.precision)}
        store = Store(self.folder, key, len(dataset))
        share = [index for index in store.missing() if index % world_size == rank]
        loader = DataLoader(
            Subset(dataset, share), self.batch_size, num_workers=self.num_workers, collate_fn=collate_readable
        )
        description = f"{source.key()['source']} of {len(share) * world_size} images ({split})"
        if rank == 0 and len(share) * world_size * source.forward_passes > LONG:
            print(f"computing {description}, {source.forward_passes} forward passes each, once; kept in {self.folder}")
        hidden = None if share and rank == 0 else True  # None: hidden where the output is no terminal
        for batch in tqdm(loader, description, disable=hidden, unit="batch", leave=False):
            if batch is not None:
                store.write(batch["index"], self._compute(source, batch))
        trainer.strategy.barrier(description)
        return store

    def _compute(self, source: Any, batch: dict[str, Tensor]) -> Rows:
        """The rows of one batch, computed in evaluation mode and with the trainer's precision."""
        trainer: Any = self.trainer
        module = trainer.lightning_module
        was_training = module.training
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            rows = source(module.eval().transfer_batch_to_device(batch, module.device, 0))
        module.train(was_training)
        return rows
