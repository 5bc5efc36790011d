"""Images from .beton files, decoded by FFCV: the same batches in the same order as `datamodules.images`, but faster.

FFCV only decodes: `write_beton` stores what the model sees. The model augments and normalises on its own device:
FFCV's augmentations cannot be seeded, and its loader hangs if images are normalised after `ToTensor`, because a
pipeline may change from compiled stages to Python stages only once.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DistributedSampler

from datamodules.beton import check_beton, description_file, keep_torch_threads, read_description
from datamodules.datasets import choose_transform
from datamodules.images import SPLITS, check_same_classes
from datamodules.loaders import Resumable, Shard, check_loading, read_division, shuffle
from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.saved.files import file_hashes
from explainers.saved.identity import first_difference

if TYPE_CHECKING:
    from ffcv.loader import Loader


class BetonLoader(Resumable):
    """Batches from an FFCV loader, in the order of a torch sampler.

    FFCV's own order is not used: it differs between one process and many, and it depends on how often the loader was
    iterated, which is not Lightning's epoch. Lightning calls `.sampler.set_epoch`.

    Args:
        loader: decodes the images.
        sampler: gives the positions of the samples of this process.
    """

    def __init__(self, loader: "Loader", sampler: DistributedSampler) -> None:
        self.loader = loader
        self.sampler = sampler
        self.batch_size = loader.batch_size
        self.batch_sampler = None  # Lightning reads it if there is a sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """A generator: its order is drawn at the first batch, because Lightning calls `iter` before `set_epoch`."""
        order = np.fromiter(self.sampler, dtype=np.uint64)
        self.loader.traversal_order.indices = order
        yield from self.counted(self._decoded(order))

    def _decoded(self, order: np.ndarray) -> Iterator[dict[str, Tensor]]:
        """The batches of the samples at these positions."""
        with keep_torch_threads():
            batches = iter(self.loader)
            wait_for_batch(batches)  # FFCV's own thread sets torch's threads before its first batch
        try:
            for start in range(0, len(order), self.batch_size):
                wait_for_batch(batches)
                fields = dict(zip(self.loader.pipeline_specs, next(batches), strict=True))
                yield as_batch(fields, order[start : start + self.batch_size])
        finally:
            batches.close()  # otherwise its thread would run until the process ends


def wait_for_batch(batches: Any) -> None:
    """Wait for the next batch; raise if FFCV's thread has died, because FFCV itself would wait forever."""
    queue = batches.output_queue
    with queue.not_empty:
        while not queue.not_empty.wait_for(queue._qsize, timeout=1):
            if not batches.is_alive():
                raise RuntimeError("expected a batch from FFCV, got none: its thread died of the error printed above")


def as_batch(fields: dict[str, Tensor], positions: np.ndarray) -> dict[str, Tensor]:
    """Copy a batch, because FFCV overwrites it with a later one; columns (B, 1) become (B,).

    Args:
        fields: `image` (B, 3, H, W), `label` (B, 1) and, if the file has it, `index` (B, 1).
        positions: positions of the samples in the file, (B,); they replace a missing `index`.

    >>> fields = {"image": torch.zeros(2, 3, 1, 1, dtype=torch.uint8), "label": torch.tensor([[5], [7]])}
    >>> batch = as_batch(fields, positions=np.array([30, 10]))
    >>> batch["label"], batch["index"]
    (tensor([5, 7]), tensor([30, 10]))
    """
    index = fields["index"].flatten() if "index" in fields else torch.from_numpy(positions.astype(np.int64))
    return {
        "image": fields["image"].clone(memory_format=torch.contiguous_format),
        "label": fields["label"].flatten().clone(),
        "index": index.clone(),
    }


def ffcv_loader(
    path: str, indices: np.ndarray, batch_size: int, threads: int, os_cache: bool, drop_last: bool
) -> "Loader":
    """Build FFCV's loader of the samples `indices`, whose images have one size."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.reader import Reader
    from ffcv.transforms import ToTensor, ToTorchImage
    from numba import config

    cores: int = config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # Numba rejects more threads
    pipelines: dict[str, list | None] = dict.fromkeys(Reader(path).field_names)  # unknown fields stay undecoded
    pipelines["image"] = [SimpleRGBImageDecoder(), ToTensor(), ToTorchImage()]
    for name in {"label", "index"} & set(pipelines):
        pipelines[name] = [IntDecoder(), ToTensor()]
    with keep_torch_threads():
        return Loader(
            path,
            batch_size,
            num_workers=min(max(threads, 1), cores),
            os_cache=os_cache,
            order=OrderOption.SEQUENTIAL,
            seed=0,  # unused; without it FFCV would draw one from numpy's generator
            indices=indices,
            pipelines=pipelines,
            drop_last=drop_last,
        )


class FFCV(LightningDataModule):
    """Images from .beton files, which `datamodules.write_beton` writes.

    Args:
        train: file of the training images.
        val: file of the validation images.
        test: file of the test images.
        transform: what images should show; a file of others is an error if their size differs, otherwise a warning.
        crop_fraction: see `datasets.choose_transform`.
        batch_size: images per training batch and process.
        eval_batch_size: images per evaluation batch and process; `None` takes `batch_size`.
        num_workers: decoding threads, at most one per core.
        seed: determines the training order.
        os_cache: True if the files fit into memory; the operating system then caches them.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        *,
        transform: ImageTransform,
        crop_fraction: float | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        seed: int = 0,
        os_cache: bool = True,
    ) -> None:
        super().__init__()
        check_loading(batch_size, eval_batch_size, num_workers)
        self.paths = {"train": train, "val": val, "test": test}
        self.transform = choose_transform(transform, crop_fraction)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.os_cache = os_cache

    def setup(self, stage: str | None = None) -> None:
        """Check the files of a stage and their classes, so that a wrong one is reported before anything is computed."""
        splits = [split for split in SPLITS.get(stage or "", tuple(self.paths)) if self.paths[split] is not None]
        names = {split: self.class_names(split) for split in splits}
        unknown = sorted({str(self.paths[split]) for split in splits if not names[split]})
        if unknown:
            warnings.warn(
                f"the classes of {', '.join(unknown)} are unknown, because there is no"
                f" {description_file(Path(unknown[0]))}; make sure that all splits have the same classes",
                stacklevel=2,
            )
        wanted = json.loads(json.dumps(asdict(self.transform)))
        for path in {self._file(split)[0] for split in splits}:
            stored = read_description(Path(path))[1]
            if stored and (difference := first_difference(wanted, stored, "transform")):
                warnings.warn(f"{path} was written with another data.transform, {difference}", stacklevel=2)
        check_same_classes(names.get("train", ()), names.get("val", ()), "write the file that lacks classes again")

    def train_dataloader(self) -> BetonLoader:
        path, samples = self._file("train")
        return self._loader(path, shuffle(samples, self.batch_size, read_division(self), self.seed), self.batch_size)

    def val_dataloader(self) -> BetonLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> BetonLoader:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: str) -> BetonLoader:
        path, samples = self._file(split)
        division = read_division(self)
        shard = Shard(range(samples), division.world_size, division.rank)  # type: ignore[arg-type]
        return self._loader(path, shard, self.eval_batch_size)

    def size(self, split: str) -> int:
        """Number of images of a split."""
        return self._file(split)[1]

    def fingerprint(self, split: str) -> dict[str, Any]:
        """See `Images`; the hash is the file's."""
        path, samples = self._file(split)
        (content,) = file_hashes([path])
        shown = read_description(Path(path))[1] or asdict(self.transform)
        return {"image": content, "label": content, "images": str(samples), "transform": shown}

    def class_names(self, split: str) -> list[str]:
        """Class names of a split in the order of their labels; empty if no description names them."""
        return read_description(Path(self._file(split)[0]))[0]

    @property
    def classes(self) -> list[str]:
        """Class names of the training images, see `class_names`."""
        return self.class_names("train")

    def _file(self, split: str) -> tuple[str, int]:
        """Path and number of samples of a split."""
        path = self.paths[split]
        if path is None:
            raise InputError(f"expected a .beton file for {split}, got none; set data.{split}, or skip that stage")
        return path, check_beton(Path(path), self.transform.size)

    def _loader(self, path: str, sampler: DistributedSampler, batch_size: int) -> BetonLoader:
        order = np.fromiter(sampler, dtype=np.uint64)
        loader = ffcv_loader(path, order, batch_size, self.num_workers, self.os_cache, sampler.drop_last)
        return BetonLoader(loader, sampler)
