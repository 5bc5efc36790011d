"""Arrays on disk, one row for each sample, filled in any order, that survive a kill."""

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
    """Memory-mapped arrays of `size` rows, in a folder named after what they hold.

    A row counts as there once everything of it has been written. Whoever finds a half-filled store fills in the rest.

    Args:
        folder: where all stores are.
        key: everything that the rows depend on; another key is another store.
        size: the number of rows.
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
        """The rows that are not there yet."""
        return np.flatnonzero(~self.done).tolist()

    def present(self) -> list[int]:
        """The rows that are there."""
        return np.flatnonzero(self.done).tolist()

    def write(self, index: Tensor, rows: Rows) -> None:
        """Write the rows `index` (B,) of every array; floating-point ones as float16."""
        where = index.cpu().numpy()
        for name, values in rows.items():
            values = values.detach().cpu()
            array = (values.half() if values.is_floating_point() else values).numpy()
            if name not in self.arrays:
                self.arrays[name] = self._open(name, (self.size, *array.shape[1:]), array.dtype)
            self.arrays[name][where] = array
        for name in rows:
            self.arrays[name].flush()
        self.done[where] = True  # only now: a kill before this line leaves the rows missing
        self.done.flush()

    def read(self, index: int) -> Rows:
        """One row of every array, floating-point ones as float32."""
        if not self.arrays:
            names = sorted(path.stem for path in self.path.glob("*.npy") if path.stem != "done")
            self.arrays = {name: np.load(self.path / f"{name}.npy", mmap_mode="r+") for name in names}
        rows = {name: torch.from_numpy(np.array(array[index])) for name, array in self.arrays.items()}
        return {name: row.float() if row.is_floating_point() else row for name, row in rows.items()}

    def _open(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
        path = self.path / f"{name}.npy"
        if (
            not path.exists()
        ):  # several processes may be here at once: each makes one of its own, and the first one stays
            made = path.with_suffix(f".{os.getpid()}.unfinished")
            np.lib.format.open_memmap(made, "w+", dtype, shape).flush()
            with suppress(FileExistsError):
                os.link(made, path)
            made.unlink()
        return np.load(path, mmap_mode="r+")
