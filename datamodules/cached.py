"""Images with what the explainer's loss needs of the target: computed once, kept on disk, read ever after."""

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


class StoredRows(Dataset[Rows]):
    """The rows of all stores as samples; those left out, of corrupt images, are not among them."""

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
    """A batch, or None where all are corrupt: the missing rows of a store that is as full as it gets."""
    return collate(samples) if any(sample is not None for sample in samples) else None


class Cached(LightningDataModule):
    """`Images` whose batches hold, instead of pixels, what the `sources` of the module in training make of them.

    The first run computes these rows, with a progress bar, and goes on where a killed one stopped. Every later run with
    the same sources, images and precision only reads them. Each source is stored separately, so that runs share what
    they have in common. There are no random crops: the images stay as they are.

    Args:
        images: loads the images.
        folder: where the rows are kept.
        batch_size: images at a time while computing.

    Raises:
        InputError: for a datamodule other than `Images`, such as FFCV's.
    """

    def __init__(self, images: Images, folder: str, batch_size: int = 16) -> None:
        super().__init__()
        if not isinstance(images, Images):
            raise InputError(
                f"expected loaders of image files to cache rows of, got {type(images).__name__}: take other data, such"
                " as data=imagenet_folder, or cache=null"
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
        """Find the images, so that a wrong path shows before anything is computed."""
        self.images.trainer = self.trainer
        self.images.setup(stage)

    def train_dataloader(self) -> DataLoader:
        return self.images.training_loader(self._rows("train"))

    def val_dataloader(self) -> DataLoader:
        return self.images.evaluation_loader(self._rows("val"))

    def test_dataloader(self) -> DataLoader:
        return self.images.evaluation_loader(self._rows("test"))

    def _rows(self, split: str) -> Dataset:
        """The rows of all images of a split, the missing ones computed."""
        trainer: Any = self.trainer
        if trainer.fast_dev_run:
            return self.dataset(split)  # the module computes the few that it needs
        stores = [self._filled(source, split) for source in trainer.lightning_module.sources]
        return StoredRows(stores, getattr(self.dataset(split), "labels", None))

    def _filled(self, source: Any, split: str) -> Store:
        """The store of a source, full: every process computes its share of what is missing."""
        trainer: Any = self.trainer
        dataset, (rank, world_size) = self.dataset(split), rank_and_world_size(self)
        key = source.key() | {"images": dataset.fingerprint(), "precision": str(trainer.precision)}
        store = Store(self.folder, key, len(dataset))
        missing = [index for index in store.missing() if index % world_size == rank]
        loader = DataLoader(
            Subset(dataset, missing), self.batch_size, num_workers=self.num_workers, collate_fn=collate_readable
        )
        what = f"{source.key()['source']} of {len(missing) * world_size} images ({split})"
        for batch in tqdm(loader, what, disable=not missing or rank > 0, unit="batch", leave=False):
            if batch is not None:
                store.write(batch["index"], self._compute(source, batch))
        trainer.strategy.barrier(what)
        return store

    def _compute(self, source: Any, batch: dict[str, Tensor]) -> Rows:
        trainer: Any = self.trainer
        module = trainer.lightning_module
        training = module.training
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            rows = source(module.eval().transfer_batch_to_device(batch, module.device, 0))
        module.train(training)
        return rows
