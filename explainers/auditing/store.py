"""The evidence of a set of images on disk, in shards that several processes write, and that a killed run continues.

An image takes 2 D (P + 1) + 2 P + 28 bytes, for the width D of the embedding and P strongest patches. With P = 40, a
million images of ViT-Tiny (D = 192) take 15.9 GB, and those of ViT-B (D = 768) 63.1 GB; the vectors of all N = 196
patches in float32 would take 151 and 602 GB.
"""

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from explainers.auditing.evidence import Evidence, take_evidence
from explainers.errors import InputError
from explainers.images.listing import several
from explainers.runtime.progress import progress, watching
from explainers.saved.files import write_atomically
from explainers.saved.identity import Identity, architecture_hash, weights_hash
from explainers.saved.weights import name_difference, read_header, read_sealed, read_tensors, save_tensors, seal

NAMES = tuple(field.name for field in fields(Evidence))

KIND = "the evidence of an audit"
ADVICE = "delete it, and repeat the command of the audit"

LISTING = "photos.json"
"""File beside the shards: names and labels of all images, in the order of their numbers."""

Stamp = list[int] | None
"""Tells a file from a later one of this name, see `stamp`."""

PLAIN = (bool, int, float, str, list, tuple, NoneType)
"""Types of the settings of an explainer."""

WAITING = 1.0
"""Time between two looks for the shards of other processes, in seconds."""


@dataclass(frozen=True)
class Source:
    """The images of an audit, which are decoded when they are needed.

    Args:
        names: of the images, relative to their folder.
        labels: the class of each image; −1 where it is not known.
        files: of the images; empty if they are in memory. Evidence of a shard is taken again if one has changed.
        batches: a function of a range of image numbers → batches: pixels, uint8 (B, C, H, W), and the numbers of these
            images. It leaves out broken files.
    """

    names: Sequence[str]
    labels: Sequence[int]
    files: Sequence[Path]
    batches: Callable[[range], Iterable[tuple[Tensor, Sequence[int]]]]

    def identity(self) -> Identity:
        """The number of images, and hashes of their names and of their labels."""
        hashes = {"names_sha256": _hash([*self.names]), "labels_sha256": _hash([*self.labels])}
        return {"count": len(self.names), **hashes}

    def stamps(self, part: range) -> list[Stamp]:
        """See `stamp`, of some files."""
        return [stamp(path) for path in self.files[part.start : part.stop]]


def stamp(path: Path | None) -> Stamp:
    """The size of a file in bytes, and when it was changed, in nanoseconds; `None` if it is gone."""
    with suppress(OSError):
        return [(status := os.stat(path or "")).st_size, status.st_mtime_ns]
    return None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def describe_explainer(explainer: Any) -> Identity:
    """The class of an explainer, its attributes that are plain values, and hashes of its network if it has one."""
    plain = {name: value for name, value in vars(explainer).items() if isinstance(value, PLAIN) and name[0] != "_"}
    described = {"class": type(explainer).__name__, "grid": list(explainer.grid.shape), **plain}
    network = getattr(explainer, "network", None)
    if isinstance(network, nn.Module):
        described |= {"architecture_sha256": architecture_hash(network), "network_sha256": weights_hash(network)}
    return described


def process_number() -> tuple[int, int]:
    """The number of this process, from 0, and how many torchrun or srun has started; (0, 1) without them.

    A batch script of SLURM has SLURM_NTASKS, too, but runs once.
    """
    for number, count in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if number in os.environ and count in os.environ:
            return int(os.environ[number]), int(os.environ[count])
    return 0, 1


class EvidenceStore:
    """Evidence in a folder: `evidence/00000.safetensors` and so on, each of a range of images.

    Args:
        folder: the folder of the audit.
        shard_size: number of images of the shards that `collect` writes.
    """

    def __init__(self, folder: str | Path, shard_size: int = 1024) -> None:
        self.folder = Path(folder) / "evidence"
        self.own: Identity = {}
        self.shard_size = shard_size

    def collect(self, explainer: Any, source: Source, strongest: int = 40) -> bool:
        """Take the evidence of all images that the folder lacks, and store it.

        Processes share the shards, see `process_number`. After a kill, the same command continues with the shards that
        are not written, and takes evidence again where files have changed. Process 0 waits for those of the others, and
        warns of broken files.

        Args:
            explainer: see `take_evidence`, as for `strongest`.
            source: the images.

        Returns:
            True in process 0, once all shards are written; False in the others.

        Raises:
            InputError: if the folder holds the evidence of another audit, or if no image can be decoded.
        """
        own: Identity = {
            "target": explainer.target.identity(),
            "explainer": describe_explainer(explainer),
            "images": source.identity(),
            "strongest": strongest,
            "shard_size": self.shard_size,
        }
        rank, processes = process_number()
        self.own, count = own, len(source.names)
        self.check()
        shards = [range(start, min(start + self.shard_size, count)) for start in range(0, count, self.shard_size)]
        self._delete_changed(source, shards)
        if rank == 0:
            write_atomically(self.folder / LISTING, json.dumps([[*source.names], [*source.labels]]))
        mine = range(rank, len(shards), processes)
        missing = [number for number in mine if not self._path(number).exists()]
        images, left = (sum(len(shards[number]) for number in some) for some in (mine, missing))
        with (
            progress("collecting evidence", images, "image", images - left, shown=rank == 0, delay=2) as bar,
            watching(lambda passes: None),  # what decodes or computes shows no bar of its own
        ):
            for number in missing:
                parts, stamps = [], source.stamps(shards[number])
                for pixels, numbers in source.batches(shards[number]):
                    labels = torch.tensor([source.labels[image] for image in numbers])
                    part = take_evidence(explainer, pixels, labels, strongest)
                    parts.append(replace(part, numbers=torch.tensor(numbers)))
                    bar.update(len(numbers))
                rows, header = _join(parts), own | {"files": stamps, "shard": number}
                save_tensors(rows, self._path(number), header | {"sha256": seal(header, rows)})
        if rank == 0:
            self._wait(len(shards), processes)
            self.check()  # another audit may have started with the same folder
            self._name_broken(source.names)
        return rank == 0

    def shards(self) -> Iterator[Evidence]:
        """Read one shard after the other, in the order of the images; a shard of broken files alone is left out."""
        for path in self._paths(read_header(self._path(0), KIND)):
            _, tensors = read_tensors(path, KIND)
            if len(tensors["numbers"]):
                yield Evidence(**tensors)

    def identity(self) -> Identity:
        """What the evidence depends on: `target`, `explainer`, `images`, `strongest` and `shard_size`.

        Raises:
            InputError: if a shard is missing, or not as it was written.
        """
        header = self._verify(self._path(0))
        for path in self._paths(header)[1:]:
            self._verify(path)
        return {name: value for name, value in header.items() if name not in ("files", "shard")}

    def stamps(self) -> list[Stamp]:
        """See `stamp`, of the files of all images when their evidence was taken; empty if they were in memory."""
        own = read_header(self._path(0), KIND)
        return [each for path in self._paths(own) for each in read_header(path, KIND)["files"]]

    def listing(self) -> dict[str, int]:
        """Name → label of all images, in the order of their numbers; empty if it is not known."""
        try:
            names, labels = json.loads((self.folder / LISTING).read_text(encoding="utf-8"))
            return dict(zip(names, labels, strict=True))
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"

    def _paths(self, own: Identity) -> list[Path]:
        """The files of all shards of evidence with an identity, written or not; a warning names files beside them."""
        paths = [self._path(number) for number in range(-(-own["images"]["count"] // own["shard_size"]))]
        others = sorted({*self.folder.glob("[0-9]*.safetensors")} - {*paths})
        if others:
            warnings.warn(f"left out: {several(others)} beside the {len(paths)} shards in {self.folder}", stacklevel=2)
        return paths

    def _verify(self, path: Path) -> Identity:
        """Read the header of a shard; an InputError unless it is as it was written, under its own number."""
        if not path.is_file():
            raise InputError(f"{path}: expected {KIND}, got no file: repeat the command of the audit")
        header, _ = read_sealed(path, KIND, ADVICE)
        if header["shard"] != int(path.stem):
            raise InputError(f"{path}: expected shard {int(path.stem)}, got a copy of {header['shard']}: {ADVICE}")
        return header

    def check(self) -> None:
        """Raise an InputError if the folder holds evidence of another audit than `collect` has taken."""
        stated = json.loads(json.dumps(self.own))  # as a header has it
        for path in self._written():
            difference = name_difference(read_header(path, KIND), stated)
            if difference is not None:
                raise self._refuse(difference)

    def _written(self) -> list[Path]:
        """The files of the shards that this audit has written so far."""
        return [path for path in self._paths(self.own) if path.exists()]

    def _refuse(self, difference: str) -> InputError:
        return InputError(
            f"output: expected a folder of this audit alone, got {self.folder.parent}, which holds another audit, which"
            f" differs in {difference}: give another folder, or delete this one",
            "output",
        )

    def _delete_changed(self, source: Source, shards: Sequence[range]) -> None:
        """Delete shards with files that have changed or are gone; refuse evidence if most files have changed."""
        changed: dict[Path, list[Path]] = {}
        count = 0
        for path in self._written():
            start = int(path.stem) * self.shard_size
            before, now = self._verify(path)["files"], source.stamps(range(start, start + self.shard_size))
            if len(before) != len(now):
                raise self._refuse("images.files")
            changed[path] = [Path(source.names[start + row]) for row in range(len(now)) if before[row] != now[row]]
            count += len(now)
        names, stale = sum(changed.values(), []), [path for path in changed if changed[path]]
        if 2 * len(names) > count:
            raise self._refuse(f"images.files, most of which have changed: {several(names)}")
        if names:
            again = f"evidence of {len(stale)} of {len(shards)} shards is taken again"
            warnings.warn(f"{again}: {several(names)} changed or deleted since", stacklevel=3)
        for path in stale:
            path.unlink(missing_ok=True)

    def _wait(self, shards: int, processes: int) -> None:
        """Wait until other processes have written their shards."""
        with progress("waiting for other processes", shards, "shard", len(self._written())) as bar:
            if bar.n < shards:
                line = f"process 0 of {processes} is done and waits for the others; start those again that have ended"
                print(line, file=sys.stderr, flush=True)
            while bar.n < shards:
                time.sleep(WAITING)
                bar.update(len(self._written()) - bar.n)

    def _name_broken(self, names: Sequence[str]) -> None:
        """Warn of images without evidence, whose files are broken; an InputError if all are."""
        broken = {*range(len(names))}
        for path in self._written():
            with safe_open(path, "pt") as file:
                broken.difference_update(file.get_tensor("numbers").tolist())
        files = f"{several([Path(names[number]) for number in sorted(broken)])} that cannot be decoded, or are gone"
        if len(broken) == len(names):
            raise InputError(f"expected images, got {files}: give another folder")
        if broken:
            warnings.warn(f"left out: {files}", stacklevel=3)


def _join(parts: Sequence[Evidence]) -> dict[str, Tensor]:
    """The rows of batches as one tensor for each name; for a shard of broken files alone, no numbers."""
    if not parts:
        return {"numbers": torch.zeros(0, dtype=torch.long)}
    with torch.autocast("cpu", enabled=False):  # a caller's would refuse float16
        return {name: torch.cat([getattr(part, name) for part in parts]) for name in NAMES}
