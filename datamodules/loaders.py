"""Loaders with the same batches for one process and for many, and with or without corrupt images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from datamodules.datasets import Sample
from explainers.errors import InputError, check_positive, check_range
from explainers.images.loading import deliver_batches


def check_loading(batch_size: int, eval_batch_size: int | None, num_workers: int) -> None:
    """Raise an InputError that names the first setting with which a loader cannot work."""
    check_positive(batch_size=batch_size)
    if eval_batch_size is not None:
        check_positive(eval_batch_size=eval_batch_size)
    check_range(0, num_workers=num_workers)


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


@dataclass(frozen=True)
class Division:
    """How the images of an optimiser step are divided.

    Args:
        rank: number of this process, from 0 to `world_size` − 1.
        world_size: number of processes.
        batches: batches of each process in a step.
    """

    rank: int = 0
    world_size: int = 1
    batches: int = 1


class Shuffled(DistributedSampler[int]):
    """A shuffled share of the indices, the same in every run. It may start in the middle of an epoch.

    `first` is the number of images, of all processes, that are left out at the start; the next epoch sets it to 0.

    >>> sampler = Shuffled(range(6), num_replicas=2, rank=0, seed=0)
    >>> whole = list(sampler)
    >>> sampler.first = 4
    >>> list(sampler) == whole[2:]
    True
    """

    first = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.first = self.first if epoch == self.epoch else 0
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.first // self.num_replicas, None)


def shuffle(size: int, batch_size: int, division: Division, seed: int) -> Shuffled:
    """Build a sampler of shuffled samples. Batch k of all processes together is batch k of a single process.

    The order depends only on the seed and the epoch. Images that do not fill the last step are left out of an epoch,
    unless the epoch has no other step.

    Args:
        size: number of samples of the data set.
        batch_size: samples per batch and process.
        division: how a step is divided among processes and batches.
        seed: determines the order, together with the epoch.

    >>> single = list(shuffle(8, batch_size=4, division=Division(), seed=0))
    >>> first, second = (list(shuffle(8, 2, Division(rank, 2), seed=0)) for rank in (0, 1))
    >>> set(single[:4]) == set(first[:2] + second[:2])
    True
    """
    step = batch_size * division.batches
    whole = size >= step * division.world_size
    order = Shuffled(range(size), division.world_size, division.rank, shuffle=True, seed=seed, drop_last=whole)  # type: ignore[arg-type]
    if whole:
        order.num_samples -= order.num_samples % step
        order.total_size = order.num_samples * division.world_size
    return order


class Resumable:
    """What Lightning needs of a loader to resume a run within an epoch.

    The state counts images of all processes, so that the resumed run may have another number of processes.
    """

    sampler: Any
    batch_size: Any
    batches = 0
    """Batches of this epoch that the loader has delivered, including those before an interruption."""

    @property
    def images_per_batch(self) -> int:
        """Images in a batch of all processes together."""
        return self.batch_size * getattr(self.sampler, "num_replicas", 1)  # debug=overfit: Lightning's own sampler

    @property
    def first_batch(self) -> int:
        """Number of batches of this epoch that were delivered before the run was interrupted."""
        return getattr(self.sampler, "first", 0) // self.images_per_batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its images that were delivered."""
        return {"epoch": getattr(self.sampler, "epoch", 0), "images": self.batches * self.images_per_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume after the images that a `state_dict` counts.

        Raises:
            InputError: if they are not a whole number of batches.
        """
        if state["images"] % self.images_per_batch:
            raise InputError(
                f"expected a checkpoint after whole batches of {self.images_per_batch} images, got one after"
                f" {state['images']} images of an epoch: resume with as many images per step as before"
            )
        self.sampler.epoch = state["epoch"]
        self.sampler.first = state["images"]
        self.batches = self.first_batch

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, or of the rest of it, and count them."""
        self.batches = self.first_batch
        for batch in batches:
            self.batches += 1
            yield batch


def next_readable(samples: Any, start: int) -> Sample:
    """Return the first sample that is not corrupt (None), from position `start` on; position 0 follows the last one.

    Raises:
        InputError: if all samples are corrupt.

    >>> next_readable([{"index": 0}, None, None], start=1)
    {'index': 0}
    """
    for step in range(len(samples)):
        sample = samples[(start + step) % len(samples)]
        if sample is not None:
            return sample
    raise InputError(
        f"expected at least 1 readable image, got {len(samples)} that are all corrupt; repair or replace them"
    )


class Readable(Dataset[Sample]):
    """The samples of a data set; the next readable sample replaces a corrupt one.

    Distributed training needs this: every process gets the same number of batches, all of the same size.

    Args:
        samples: the data set, whose corrupt samples are None.
    """

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return next_readable(self.samples, index)


def collate(samples: list[Sample | None]) -> dict[str, Tensor] | None:
    """Stack samples to a batch. Corrupt samples, which are None, are left out; if all are corrupt, the batch is None.

    >>> collate([{"label": 3, "index": 0}, None, {"label": 5, "index": 2}])
    {'label': tensor([3, 5]), 'index': tensor([0, 2])}
    >>> collate([None, None]) is None
    True
    """
    readable = [sample for sample in samples if sample is not None]
    return default_collate(readable) if readable else None


class EpochLoader(Resumable, DataLoader[Sample]):  # type: ignore[misc]
    """Starts to load when the first batch is requested, not when the iterator is created; skips batches that are None.

    Lightning creates the iterator of a resumed epoch before it calls `set_epoch`, and loader processes read the order
    as soon as they start. Without this class, every resumed run would silently repeat the order of epoch 0.
    """

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        empty = True
        for batch in self.counted(deliver_batches(super().__iter__(), self.num_workers)):
            if batch is not None:
                empty = False
                yield batch
        if empty:
            next_readable(self.dataset, 0)  # raises if the images of all other processes are corrupt too


def epoch_loader(
    samples: Any, sampler: DistributedSampler, batch_size: int, num_workers: int, drop_last: bool, seed: int
) -> EpochLoader:
    """Build a loader that keeps its processes between epochs, and draws from a random generator of its own."""
    return EpochLoader(
        samples,
        batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        drop_last=drop_last,
        persistent_workers=num_workers > 0,
        generator=torch.Generator().manual_seed(seed),  # otherwise each epoch would draw from torch's own
    )


def read_division(datamodule: LightningDataModule) -> Division:
    """Return how the datamodule's trainer divides a step; without a trainer, there is one process and one batch."""
    trainer = datamodule.trainer
    return Division(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches) if trainer else Division()
