"""Images out of .beton files, decoded by FFCV: the same batches in the same order as `datamodules.images`, faster.

FFCV decodes and crops, nothing else. Its augmentations cannot be seeded, and normalising after `ToTensor` makes its
loader wait for ever (stages may go from compiled to Python once only): both belong to the model, on its device.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DistributedSampler

from datamodules.images import SPLITS, Shard, rank_and_world_size, shuffle
from datamodules.write_beton import check_beton, keep_torch_threads, require_ffcv
from explainers.errors import InputError

if TYPE_CHECKING:
    from ffcv.loader import Loader


class BetonLoader:
    """Batches out of an FFCV loader, in the order of a torch sampler.

    The order is the sampler's because FFCV's own differs between one process and many, and goes by how often the loader
    was iterated, which in Lightning is not the epoch. Lightning finds `.sampler.set_epoch`.
    """

    def __init__(self, loader: "Loader", sampler: DistributedSampler) -> None:
        self.loader = loader
        self.sampler = sampler
        self.batch_sampler = None  # Lightning asks for it where there is a sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """A generator: it begins with the first batch, after `set_epoch`, and not when Lightning makes the iterator."""
        order = np.fromiter(self.sampler, dtype=np.uint64)
        self.loader.traversal_order.indices = order
        size = self.loader.batch_size
        with keep_torch_threads():
            batches = iter(self.loader)
            wait_for_batch(batches)  # FFCV's thread has then set them too
        try:
            for start in range(0, len(self) * size, size):
                wait_for_batch(batches)
                fields = dict(zip(self.loader.pipeline_specs, next(batches), strict=True))
                yield as_batch(fields, order[start : start + size])
        finally:
            batches.close()  # or its thread would stay, as long as the process


def wait_for_batch(batches: Any) -> None:
    """Raise where FFCV's thread died of an error: FFCV itself would wait for it for ever."""
    queue = batches.output_queue
    with queue.not_empty:
        while not queue.not_empty.wait_for(queue._qsize, timeout=1):
            if not batches.is_alive():
                raise RuntimeError("expected a batch from FFCV, got none: its thread died of the error printed above")


def as_batch(fields: dict[str, Tensor], positions: np.ndarray) -> dict[str, Tensor]:
    """Copies, because FFCV writes later batches over this one; (B, 1) columns become (B,)."""
    index = fields["index"].flatten() if "index" in fields else torch.from_numpy(positions.astype(np.int64))
    return {
        "image": fields["image"].clone(memory_format=torch.contiguous_format),
        "label": fields["label"].flatten().clone(),
        "index": index.clone(),
    }


def ffcv_loader(
    path: str,
    indices: np.ndarray,
    crop: int,
    short_side: int,
    batch_size: int,
    threads: int,
    os_cache: bool,
    drop_last: bool,
) -> "Loader":
    """FFCV's loader of the samples `indices`: centre crops of side `crop`, of images scaled to `short_side`."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.reader import Reader
    from ffcv.transforms import ToTensor, ToTorchImage
    from numba import config

    # FFCV rounds ratio * short side down: half a pixel more gives exactly `crop` of images stored at `short_side`
    ratio = min(1.0, (crop + 0.5) / short_side)
    cores: int = config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # Numba refuses more threads
    pipelines: dict[str, list | None] = dict.fromkeys(Reader(path).field_names)  # other people's fields stay undecoded
    pipelines["image"] = [CenterCropRGBImageDecoder((crop, crop), ratio), ToTensor(), ToTorchImage()]
    for name in {"label", "index"} & set(pipelines):
        pipelines[name] = [IntDecoder(), ToTensor()]
    with keep_torch_threads():
        return Loader(
            path,
            batch_size,
            num_workers=min(max(threads, 1), cores),
            os_cache=os_cache,
            order=OrderOption.SEQUENTIAL,
            seed=0,  # unused; without it FFCV takes a draw from numpy's
            indices=indices,
            pipelines=pipelines,
            drop_last=drop_last,
        )


class FFCV(LightningDataModule):
    """Images out of .beton files, see `datamodules.write_beton`.

    Args:
        train, val, test: paths.
        image_size: S.
        crop_fraction: the part of the short side that the centre crop keeps.
        batch_size: images per training batch and process.
        eval_batch_size: images per evaluation batch and process; as in training where it is left out.
        num_workers: decoding threads; never more than there are cores.
        seed: of the training order.
        os_cache: whether the file fits into memory, where the system then keeps it.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        image_size: int = 224,
        crop_fraction: float = 0.875,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        seed: int = 0,
        os_cache: bool = True,
    ) -> None:
        super().__init__()
        self.paths = {"train": train, "val": val, "test": test}
        self.image_size = image_size
        self.crop_fraction = crop_fraction
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.os_cache = os_cache

    def setup(self, stage: str | None = None) -> None:
        """Look at the files of a stage, so that a wrong path shows before anything is computed."""
        require_ffcv()
        for split in SPLITS.get(stage or "", tuple(self.paths)):
            path = self.paths[split]
            if path is not None:
                check_beton(Path(path))

    def train_dataloader(self) -> BetonLoader:
        path, samples, (rank, world_size) = *self._file("train"), rank_and_world_size(self)
        return self._loader(path, shuffle(samples, self.batch_size, rank, world_size, self.seed), self.batch_size)

    def val_dataloader(self) -> BetonLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> BetonLoader:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: str) -> BetonLoader:
        path, samples, (rank, world_size) = *self._file(split), rank_and_world_size(self)
        return self._loader(path, Shard(range(samples), world_size, rank), self.eval_batch_size)  # type: ignore[arg-type]

    def _file(self, split: str) -> tuple[str, int]:
        """The path and the number of samples of a split."""
        path = self.paths[split]
        if path is None:
            raise InputError(f"expected a .beton file for {split}, got none; set data.{split}, or skip that stage")
        require_ffcv()
        return path, check_beton(Path(path))

    def _loader(self, path: str, sampler: DistributedSampler, batch_size: int) -> BetonLoader:
        return BetonLoader(
            ffcv_loader(
                path,
                np.fromiter(sampler, dtype=np.uint64),
                self.image_size,
                round(self.image_size / self.crop_fraction),
                batch_size,
                self.num_workers,
                self.os_cache,
                sampler.drop_last,
            ),
            sampler,
        )
