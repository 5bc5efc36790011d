"""Caches what a loss needs of frozen models: the first run computes and stores it, later runs read it."""

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.images import Images
from datamodules.store import Numbered, Rows, Store, StoredRows, readable_and_corrupt
from explainers.errors import InputError, check_positive
from explainers.images.loading import deliver_batches
from explainers.runtime.progress import progress
from explainers.saved.files import is_shared

LONG = 50_000
"""Number of forward passes above which they are announced: they take minutes on a CPU."""


class Cached(LightningDataModule):
    """Replaces the pixels in the batches of `Images` by the outputs of the training module's `sources`.

    The first run computes these rows and shows its progress. If it is killed, the next run computes only the missing
    rows. Later runs with the same sources, images and precision only read them. Every source has its own store: two
    runs with a common source share its store. Images are not cropped at random.

    Args:
        images: loads the images.
        folder: folder of all stores, on a file system that all processes share.
        batch_size: images per batch while the rows are computed.

    Raises:
        InputError: if `images` is another datamodule than `Images`, such as `FFCV`.
    """

    def __init__(self, images: Images, folder: str, batch_size: int = 16) -> None:
        super().__init__()
        if not isinstance(images, Images):
            raise InputError(
                f"expected data with torch loaders, whose rows can be cached, got {type(images).__name__}: set"
                " cache=none, or take other data, such as data=imagenet_folder"
            )
        check_positive(batch_size=batch_size)
        self.images = images
        self.folder = folder
        self.batch_size = batch_size
        self.dataset, self.fingerprint, self.class_names = images.dataset, images.fingerprint, images.class_names
        self.templates, self.num_workers = images.templates, images.num_workers

    @property
    def classes(self) -> list[str]:
        """See `Images`."""
        return self.images.classes

    def setup(self, stage: str | None = None) -> None:
        """Build the data sets, so that a wrong path is reported before anything is computed."""
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
        dataset = self.dataset(split)
        if trainer.fast_dev_run:
            return dataset  # the module computes the rows of these few images itself
        not_shared = (
            f"expected a folder that all processes share, got {self.folder}, where some processes do not see the files"
            " of others; set cache_dir to a folder on a shared file system"
        )
        self._require(is_shared(Path(self.folder), trainer.strategy), not_shared)
        fingerprint = self._common_fingerprint(split)
        stores = [self._filled(source, split, fingerprint) for source in trainer.lightning_module.sources]
        self._require(not any(store.missing() for store in stores), not_shared)
        rows = StoredRows(stores, getattr(dataset, "labels", None))
        if rows.corrupt and trainer.is_global_zero:
            first = rows.corrupt[0]
            name = dataset.path(first) if hasattr(dataset, "path") else f"image {first}"
            warnings.warn(f"left out: {len(rows.corrupt)} of {len(dataset)} images, such as {name}", stacklevel=2)
        return rows

    def _require(self, holds: bool, problem: str) -> None:
        """Raise an InputError in all processes if a condition does not hold in one of them."""
        trainer: Any = self.trainer
        if not trainer.strategy.reduce_boolean_decision(holds):
            raise InputError(problem)

    def _common_fingerprint(self, split: str) -> dict[str, str]:
        """The fingerprint of a split; process 0 hashes the files, and the others read the hashes that it stored."""
        trainer: Any = self.trainer
        first = trainer.strategy.broadcast(self.fingerprint(split) if trainer.is_global_zero else None)
        own = first if trainer.is_global_zero else self.fingerprint(split)
        self._require(own == first, f"expected the same {split} images in all processes, got different ones")
        return first

    def _filled(self, source: Any, split: str, fingerprint: dict[str, str]) -> Store:
        """The completely filled store of a source; every process computes its share of the missing rows."""
        trainer: Any = self.trainer
        dataset = self.dataset(split)
        rank, world_size = trainer.global_rank, trainer.world_size
        data = {entry: fingerprint[entry] for entry in source.entries}
        store = Store(self.folder, source.key() | {"data": data, "precision": str(trainer.precision)}, len(dataset))
        missing = store.missing()
        if not getattr(dataset, "skip_corrupt", True):
            missing = sorted(missing + store.corrupt())  # an earlier run left them out; now they are an error
        share = [index for index in missing if index % world_size == rank]
        loader = DataLoader(
            Numbered(dataset, share), self.batch_size, num_workers=self.num_workers, collate_fn=readable_and_corrupt
        )
        description = f"{source.key()['source']} of {len(share) * world_size} images ({split})"
        if rank == 0 and len(share) * world_size * source.forward_passes > LONG:
            print(f"computing {description}, {source.forward_passes} forward passes each, once; kept in {self.folder}")
        with progress(description, len(loader), "batch", shown=bool(share) and rank == 0) as bar:
            for batch, corrupt in deliver_batches(loader, self.num_workers):
                if corrupt:
                    store.mark_corrupt(corrupt)
                if batch is not None:
                    store.write(batch["index"], self._compute(source, batch))
                bar.update(1)
        trainer.strategy.barrier(description)
        store.refresh(source.provides)
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
