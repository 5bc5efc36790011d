"""Arrays on disk with one row per sample; rows are written in any order, and a killed run loses no written row."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Rows = dict[str, Tensor]


class Store:
    """Memory-mapped arrays of `size` rows, in a folder named after the hash of their key.

    A row is present once all of its arrays have been written. A later run computes the missing rows of its store.

    Args:
        folder: folder of all stores.
        key: everything that the rows depend on, JSON-serialisable; each key has a store of its own.
        size: number of rows.

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
        (self.path / "key.json").write_text(text)
        self.size = size
        self.arrays: dict[str, np.memmap] = {}
        self.done = self._open("done", (size,), np.dtype(bool))

    def missing(self) -> list[int]:
        """Indices of the rows that have not been written yet."""
        return np.flatnonzero(~self.done).tolist()

    def present(self) -> list[int]:
        """Indices of the rows that have been written."""
        return np.flatnonzero(self.done).tolist()

    def write(self, index: Tensor, rows: Rows) -> None:
        """Write the rows `index` (B,) of every array; floating-point values are stored as float16."""
        positions = index.cpu().numpy()
        for name, values in rows.items():
            values = values.detach().cpu()
            array = (values.half() if values.is_floating_point() else values).numpy()
            if name not in self.arrays:
                self.arrays[name] = self._open(name, (self.size, *array.shape[1:]), array.dtype)
            self.arrays[name][positions] = array
        for name in rows:
            self.arrays[name].flush()
        self.done[positions] = True  # last, so that the rows of a run killed before this line stay missing
        self.done.flush()

    def read(self, index: int) -> Rows:
        """One row of every array; floating-point values become float32."""
        if not self.arrays:
            names = sorted(path.stem for path in self.path.glob("*.npy") if path.stem != "done")
            self.arrays = {name: np.load(self.path / f"{name}.npy", mmap_mode="r+") for name in names}
        rows = {name: torch.from_numpy(np.array(array[index])) for name, array in self.arrays.items()}
        return {name: row.float() if row.is_floating_point() else row for name, row in rows.items()}

    def _open(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
        """The array of a name, created if its file is missing."""
        path = self.path / f"{name}.npy"
        if not path.exists():
            # Several processes may create the array at once: each writes a file of its own, and the first one is kept
            unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
            np.lib.format.open_memmap(unfinished, "w+", dtype, shape).flush()
            with suppress(FileExistsError):
                os.link(unfinished, path)
            unfinished.unlink()
        return np.load(path, mmap_mode="r+")
