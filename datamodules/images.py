"""Torch loaders of image data sets, with the same batches for one process and for many."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from datamodules.datasets import Sample
from explainers.errors import InputError

SPLITS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


class Shard(DistributedSampler[int]):
    """The indices rank, rank + world size, ...; without padding, so that no image is counted twice.

    It is a `DistributedSampler`, because Lightning by default replaces any other sampler by one that pads.

    >>> list(Shard(range(5), num_replicas=2, rank=1))
    [1, 3]
    """

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class EpochLoader(DataLoader[Sample]):
    """Starts to load when the first batch is requested, not when the iterator is created.

    Lightning creates the iterator of a resumed epoch before it calls `set_epoch`, and loader processes draw the order
    as soon as they start. Without this class every resumed run would silently repeat the order of epoch 0.
    """

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        yield from super().__iter__()


def shuffle(size: int, batch_size: int, rank: int, world_size: int, seed: int) -> DistributedSampler:
    """A sampler of shuffled samples. Batch k of all processes together is batch k of a single process.

    The order depends on the seed and the epoch only. An incomplete last batch is left out unless it is the only batch.

    Args:
        size: number of samples of the data set.
        batch_size: samples per batch and process.
        rank: number of this process.
        world_size: number of processes.
        seed: determines the order, together with the epoch.

    >>> single = list(shuffle(8, batch_size=4, rank=0, world_size=1, seed=0))
    >>> first, second = (list(shuffle(8, batch_size=2, rank=rank, world_size=2, seed=0)) for rank in (0, 1))
    >>> set(single[:4]) == set(first[:2] + second[:2])
    True
    """
    drop_last = size >= batch_size * world_size
    return DistributedSampler(range(size), world_size, rank, shuffle=True, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]


def collate(samples: list[Sample | None]) -> dict[str, Tensor]:
    """Stack the samples to a batch. Corrupt samples are None and are left out.

    >>> collate([{"label": 3, "index": 0}, None, {"label": 5, "index": 2}])
    {'label': tensor([3, 5]), 'index': tensor([0, 2])}
    """
    readable = [sample for sample in samples if sample is not None]
    if not readable:
        raise InputError(f"expected at least 1 readable image in a batch, got {len(samples)} corrupt ones; repair them")
    return default_collate(readable)


def rank_and_world_size(datamodule: LightningDataModule) -> tuple[int, int]:
    """Number of this process, and number of processes; (0, 1) without a trainer."""
    trainer = datamodule.trainer
    return (trainer.global_rank, trainer.world_size) if trainer else (0, 1)


class Images(LightningDataModule):
    """Batches from any data sets of samples, see `datamodules.datasets`.

    Args:
        train: builds the training data set, when it is needed.
        val: builds the validation data set, when it is needed.
        test: builds the test data set, when it is needed.
        batch_size: images per training batch and process.
        eval_batch_size: images per evaluation batch and process; `None` takes `batch_size`.
        num_workers: loader processes, each with one thread; 0 decodes in the main process.
        seed: determines the training order.
    """

    def __init__(
        self,
        train: Callable[[], Dataset] | None = None,
        val: Callable[[], Dataset] | None = None,
        test: Callable[[], Dataset] | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.builders = {"train": train, "val": val, "test": test}
        self.datasets: dict[str, Any] = {}
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.seed = seed

    def setup(self, stage: str | None = None) -> None:
        """Build the data sets of a stage, so that a wrong path is reported before anything is computed."""
        for split in SPLITS.get(stage or "", tuple(self.builders)):
            if self.builders[split] is not None:
                self.dataset(split)
        train, val = (getattr(self.datasets.get(split), "classes", ()) for split in ("train", "val"))
        if train and val and list(train) != list(val):
            raise InputError(
                f"expected training and validation images of the same classes, got {len(train)} and {len(val)} that"
                f" differ in {sorted(set(train) ^ set(val))[:5]}: labels go by sorted names; add the missing folders"
            )

    def dataset(self, split: str) -> Any:
        """The data set of a split, built once."""
        if split not in self.datasets:
            build = self.builders[split]
            if build is None:
                raise InputError(f"expected a data set for {split}, got none; set data.{split}, or skip that stage")
            self.datasets[split] = build()
        return self.datasets[split]

    def size(self, split: str) -> int:
        """Number of images of a split."""
        return len(self.dataset(split))

    @property
    def classes(self) -> list[str]:
        """Class names of the training images, in the order of their labels; empty if they have none."""
        return list(getattr(self.dataset("train"), "classes", ()))

    def train_dataloader(self) -> DataLoader:
        return self.training_loader(self.dataset("train"))

    def val_dataloader(self) -> DataLoader:
        return self.evaluation_loader(self.dataset("val"))

    def test_dataloader(self) -> DataLoader:
        return self.evaluation_loader(self.dataset("test"))

    def training_loader(self, samples: Any) -> DataLoader:
        """Shuffled training batches of this process's share of the samples."""
        sampler = shuffle(len(samples), self.batch_size, *rank_and_world_size(self), self.seed)
        return self._loader(samples, sampler, self.batch_size, drop_last=sampler.drop_last)

    def evaluation_loader(self, samples: Any) -> DataLoader:
        """Evaluation batches of this process's share of the samples, in their order."""
        rank, world_size = rank_and_world_size(self)
        return self._loader(samples, Shard(samples, world_size, rank), self.eval_batch_size, drop_last=False)

    def _loader(self, dataset: Dataset, sampler: DistributedSampler, batch_size: int, drop_last: bool) -> DataLoader:
        return EpochLoader(
            dataset,
            batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            drop_last=drop_last,
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator().manual_seed(self.seed),  # otherwise each epoch draws from the model's
        )
