"""Arrays on disk, with one row for each sample. Rows are written in any order; a killed run loses no written row."""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.datasets import Sample
from datamodules.loaders import collate
from explainers.errors import InputError
from explainers.saved.files import atomic, write_atomically

Rows = dict[str, Tensor]

MISSING, WRITTEN, CORRUPT = range(3)
"""States of a row. A corrupt row belongs to an image that cannot be decoded."""


class Store:
    """Memory-mapped arrays of `size` rows, in a folder named after the hash of their key.

    A row counts as written once all arrays hold it. A later run computes the missing rows of its store.

    Args:
        folder: folder of all stores.
        key: everything that the rows depend on, JSON-serialisable; each key has its own store.
        size: number of rows.

    Raises:
        InputError: in any method, if a file is damaged or lost.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(folder, {"source": "example"}, size=3)
    ...     store.write(torch.tensor([2, 0]), {"score": torch.tensor([0.5, 0.25])})
    ...     store.missing(), store.read(2)
    ([1], {'score': tensor(0.5000)})
    """

    def __init__(self, folder: str | Path, key: Mapping[str, object], size: int) -> None:
        text = json.dumps(dict(key), indent=2, sort_keys=True)
        self.path = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "key.json", text)
        self.size = size
        self.arrays: dict[str, np.memmap] = {}
        self.refresh()

    def refresh(self, names: Sequence[str] = ()) -> None:
        """Open the files again, because other processes may have written to them, and check the named arrays.

        Arrays do not stay open: loader processes open them when they read their first row.
        """
        self.done = self._open("done", (self.size,), np.dtype(np.uint8))
        self.arrays = {}
        types = self._read_types() if names and self.written() else {}
        for name in names if self.written() else ():
            self._load(name, types.get(name))

    def missing(self) -> list[int]:
        """Indices of the rows that are neither written nor corrupt."""
        return np.flatnonzero(self.done == MISSING).tolist()

    def written(self) -> list[int]:
        """Indices of the rows that have been written."""
        return np.flatnonzero(self.done == WRITTEN).tolist()

    def corrupt(self) -> list[int]:
        """Indices of the rows of corrupt images."""
        return np.flatnonzero(self.done == CORRUPT).tolist()

    def mark_corrupt(self, rows: Sequence[int]) -> None:
        """Record that the images of these rows cannot be decoded."""
        self._put("done", np.array(rows, np.int64), np.full(len(rows), CORRUPT, np.uint8))

    def write(self, index: Tensor, rows: Rows) -> None:
        """Write the rows `index` (B,) of every array; floating-point values are stored as float16.

        Raises:
            InputError: if a value exceeds the range of float16.
        """
        positions = index.cpu().numpy()
        arrays = {name: as_stored(name, values.detach().cpu(), positions) for name, values in rows.items()}
        if not self.arrays and not self._types.exists():
            with atomic(self._types) as unfinished:
                unfinished.write_text(
                    json.dumps({name: str(array.dtype) for name, array in arrays.items()}), encoding="utf-8"
                )
        for name, array in arrays.items():
            if name not in self.arrays:
                self.arrays[name] = self._open(name, (self.size, *array.shape[1:]), array.dtype)
            self._put(name, positions, array)
        # Last, so that the rows of a run killed before this line stay missing
        self._put("done", positions, np.full(len(positions), WRITTEN, np.uint8))

    def read(self, index: int) -> Rows:
        """One row of every array; floating-point values become float32."""
        if not self.arrays:
            self.arrays = {name: self._load(name, dtype) for name, dtype in self._read_types().items()}
        rows = {name: torch.from_numpy(np.array(array[index])) for name, array in self.arrays.items()}
        for name, row in rows.items():
            if row.is_floating_point() and row.isnan().any():
                raise self._damaged(self._file(name), "numbers", f"NaN in row {index}")
        return {name: row.float() if row.is_floating_point() else row for name, row in rows.items()}

    @property
    def _types(self) -> Path:
        """The file of the type of each array."""
        return self.path / "types.json"

    def _read_types(self) -> dict[str, str]:
        try:
            types = json.loads(self._types.read_text(encoding="utf-8"))
            return {name: str(np.dtype(dtype)) for name, dtype in types.items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(self._types, "the types of the arrays", "no file, or a damaged one") from error

    def _put(self, name: str, positions: np.ndarray, rows: np.ndarray) -> None:
        """Write rows of an array through its file, not through its mapping.

        A full disk then raises an OSError, and on a network file system the rows of other machines that share a page
        are kept.
        """
        array = self.done if name == "done" else self.arrays[name]
        with open(self._file(name), "r+b") as file:
            for position, row in zip(positions.tolist(), rows, strict=True):
                file.seek(array.offset + position * row.nbytes)
                file.write(row.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"

    def _open(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
        """Open the array of a name for writing; create it if its file is missing."""
        lost = name != "done" and bool(self.written())  # the file of an array exists before its first row is written
        if not self._file(name).exists() and not lost:
            self._create(self._file(name), shape, dtype)
        array = self._load(name)
        if (array.shape, array.dtype) != (shape, dtype):
            raise self._damaged(self._file(name), f"{dtype} {shape}", f"{array.dtype} {array.shape}")
        return np.lib.format.open_memmap(self._file(name), "r+")

    def _create(self, path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Create an array of zeros and reserve its disk space; another process may do the same at once."""
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        with open(self.path / "lock", "w", encoding="utf-8") as lock:
            # Only one process reserves space. Where locks are unsupported, several do, and the first file is kept
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return
            try:
                np.lib.format.open_memmap(unfinished, "w+", dtype, shape).flush()
                reserve(unfinished, path)
                with suppress(FileExistsError):
                    os.link(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)

    def _load(self, name: str, dtype: str | None = None) -> np.memmap:
        """Open the array of a name; raise an InputError if its file is damaged or lost, or of another type."""
        try:
            array = np.lib.format.open_memmap(self._file(name), "r")  # r+ would extend a truncated file with zeros
        except FileNotFoundError as error:
            raise self._damaged(self._file(name), "an array", "no file") from error
        except OSError:
            raise  # an error of the disk, the permissions or the open files
        except Exception as error:  # numpy raises many kinds for a damaged header
            raise self._damaged(self._file(name), "an array", f"a damaged file ({error})") from error
        size = self._file(name).stat().st_size
        if dtype and array.dtype != dtype:
            raise self._damaged(self._file(name), dtype, str(array.dtype))
        if array.shape[:1] != (self.size,) or size != array.offset + array.nbytes:
            raise self._damaged(self._file(name), f"{self.size} rows", f"{size} bytes for an array {array.shape}")
        return array

    def _damaged(self, file: Path, expected: str, got: str) -> InputError:
        return InputError(
            f"{file}: expected {expected}, got {' '.join(got.split())}; delete the folder {self.path}, and"
            " its rows are computed again"
        )


def as_stored(name: str, values: Tensor, positions: np.ndarray) -> np.ndarray:
    """Convert floating-point values to float16; raise an InputError that names the first image beyond the range."""
    if not values.is_floating_point():
        return values.numpy()
    halves = values.half()
    beyond = (halves.isinf() & values.isfinite() | halves.isnan()).nonzero()
    if len(beyond):
        value = values[tuple(beyond[0])].item()
        raise InputError(
            f"expected {name} of image {positions[beyond[0, 0]]} within ±65504, which half precision can hold, got"
            f" {value:g}; set cache=none"
        )
    return halves.numpy()


def reserve(unfinished: Path, path: Path) -> None:
    """Reserve disk space for all bytes of an unfinished file, so that writing them later cannot fill the disk.

    Raises:
        OSError: if the disk is too full; it names `path`, the file's final name, and its size.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    size = unfinished.stat().st_size
    try:
        with open(unfinished, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, {size / 1e9:.3g} GB needed", str(path)) from error


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
