"""The datamodule of image data sets."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypedDict

from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from datamodules.loaders import Readable, Shard, check_loading, epoch_loader, read_division, shuffle
from explainers.errors import InputError

SPLITS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
"""Stage of Lightning → the splits that it needs."""


def check_same_classes(train: Sequence[str], val: Sequence[str], remedy: str) -> None:
    """Raise an InputError if the classes of two splits differ; an empty list stands for unknown classes."""
    if train and val and list(train) != list(val):
        raise InputError(
            f"expected training and validation images of the same classes, got {len(train)} and {len(val)} that"
            f" differ in {sorted(set(train) ^ set(val))[:5]}: labels number the sorted class names; {remedy}"
        )


class Loading(TypedDict, total=False):
    """How samples become batches; see `Images`."""

    batch_size: int
    eval_batch_size: int | None
    num_workers: int
    seed: int


class Images(LightningDataModule):
    """Batches from any data sets of samples, see `datamodules`.

    In training, the next readable image replaces a corrupt one. In evaluation, corrupt images are left out.

    Args:
        train: builds the training data set, when it is needed.
        val: builds the validation data set, when it is needed.
        test: builds the test data set, when it is needed.
        templates: prompts for text heads, with `{}` where the name of a class belongs; empty for general ones.
        root: one folder for all splits, which is given to the functions that build the data sets; `None` for places of
            their own.
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
        templates: Sequence[str] = (),
        root: str | None = None,
        *,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_loading(batch_size, eval_batch_size, num_workers)
        builders: dict[str, Any] = {"train": train, "val": val, "test": test}
        placed = {} if root is None else {split: {"root": root, "split": split} for split in builders}
        self.builders = {split: build and partial(build, **placed.get(split, {})) for split, build in builders.items()}
        self.datasets: dict[str, Any] = {}
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.templates = list(templates)

    def setup(self, stage: str | None = None) -> None:
        """Build the data sets of a stage, so that a wrong path is reported before anything is computed."""
        for split in SPLITS.get(stage or "", tuple(self.builders)):
            if self.builders[split] is not None:
                self.dataset(split)
        if self.datasets.keys() >= {"train", "val"}:
            check_same_classes(self.class_names("train"), self.class_names("val"), "add the missing folders")

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

    def fingerprint(self, split: str) -> dict[str, Any]:
        """Identify the samples of a split: a hash for each of their entries, `images`, their number as a text, and how
        they became samples, `transform`, unless they are drawn.
        """
        dataset = self.dataset(split)
        shown = {"transform": asdict(dataset.transform)} if hasattr(dataset, "transform") else {}
        return dataset.fingerprint() | {"images": str(self.size(split))} | shown

    def class_names(self, split: str) -> list[str]:
        """Class names of a split in the order of their labels; empty if they are unknown."""
        return list(getattr(self.dataset(split), "classes", ()))

    @property
    def classes(self) -> list[str]:
        """Class names of the training images, see `class_names`."""
        return self.class_names("train")

    def train_dataloader(self) -> DataLoader:
        return self.training_loader(self.dataset("train"))

    def val_dataloader(self) -> DataLoader:
        return self.evaluation_loader(self.dataset("val"))

    def test_dataloader(self) -> DataLoader:
        return self.evaluation_loader(self.dataset("test"))

    def training_loader(self, samples: Any) -> DataLoader:
        """Build the loader of shuffled training batches, of this process's share of the samples."""
        sampler = shuffle(len(samples), self.batch_size, read_division(self), self.seed)
        drop_last = sampler.drop_last
        return epoch_loader(Readable(samples), sampler, self.batch_size, self.num_workers, drop_last, self.seed)

    def evaluation_loader(self, samples: Any) -> DataLoader:
        """Build the loader of evaluation batches, of this process's share of the samples, in their order."""
        division = read_division(self)
        shard = Shard(samples, division.world_size, division.rank)
        return epoch_loader(samples, shard, self.eval_batch_size, self.num_workers, False, self.seed)
