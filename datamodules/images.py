"""Image data sets in torch loaders, the same for one process and for many."""

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
    """The indices rank, rank + world size, ...: without the padding of its base class, so no image is counted twice.

    A DistributedSampler, because Lightning would put a padding one around any other by default.
    """

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class EpochLoader(DataLoader[Sample]):
    """Asks for its first batch when that is wanted, not when the iterator is made.

    Lightning makes the iterator of a resumed epoch before it calls `set_epoch`, and loader processes draw the order at
    once: every resumed run would go through the order of epoch 0 again, and say nothing.
    """

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        yield from super().__iter__()


def shuffle(size: int, batch_size: int, rank: int, world_size: int, seed: int) -> DistributedSampler:
    """An order that depends on (seed, epoch) only; batch k of all ranks together is batch k of a single process.

    The incomplete last batch is left out, unless it is the only one.
    """
    whole = size >= batch_size * world_size
    return DistributedSampler(range(size), world_size, rank, shuffle=True, seed=seed, drop_last=whole)  # type: ignore[arg-type]


def collate(samples: list[Sample | None]) -> dict[str, Tensor]:
    """Stack the samples; those left out as corrupt are None."""
    readable = [sample for sample in samples if sample is not None]
    if not readable:
        raise InputError(f"expected at least 1 readable image in a batch, got {len(samples)} corrupt ones; repair them")
    return default_collate(readable)


def rank_and_world_size(datamodule: LightningDataModule) -> tuple[int, int]:
    """(0, 1) outside a trainer."""
    trainer = datamodule.trainer
    return (trainer.global_rank, trainer.world_size) if trainer else (0, 1)


class Images(LightningDataModule):
    """Any data sets of samples, see `datamodules.datasets`, as batches.

    Args:
        train, val, test: build the data sets, each only when it is needed.
        batch_size: images per training batch and process.
        eval_batch_size: images per evaluation batch and process; as in training where it is left out.
        num_workers: loader processes, each with one thread; 0 decodes in the main process.
        seed: of the training order.
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
        """Build the data sets of a stage, so that a wrong path shows before anything is computed."""
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

    @property
    def classes(self) -> list[str]:
        """The names of the classes of the training images, in the order of their labels; empty where they have none."""
        return list(getattr(self.dataset("train"), "classes", ()))

    def train_dataloader(self) -> DataLoader:
        return self.training_loader(self.dataset("train"))

    def val_dataloader(self) -> DataLoader:
        return self.evaluation_loader(self.dataset("val"))

    def test_dataloader(self) -> DataLoader:
        return self.evaluation_loader(self.dataset("test"))

    def training_loader(self, samples: Any) -> DataLoader:
        """Shuffled batches of samples for this process."""
        sampler = shuffle(len(samples), self.batch_size, *rank_and_world_size(self), self.seed)
        return self._loader(samples, sampler, self.batch_size, drop_last=sampler.drop_last)

    def evaluation_loader(self, samples: Any) -> DataLoader:
        """Batches of samples in their order for this process."""
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
            generator=torch.Generator().manual_seed(self.seed),  # otherwise every epoch takes a draw from the model's
        )
