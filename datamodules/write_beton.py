"""Write class folders of images as one .beton file, which FFCV reads.

    python -m datamodules.write_beton data/imagenet/train data/imagenet/train.beton

The samples and their order are those of `folders.image_folder`. Images are stored as JPEG. Their short side is scaled
as in the torch loader, so that the FFCV loader only has to crop the centre.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from datamodules.datasets import CorruptImage, ImageFiles, read_image, resize_short_side
from datamodules.folders import image_folder
from explainers.errors import InputError

RGB_IMAGE, INT = 2, 1  # ffcv.types.TYPE_ID_HANDLER


@contextlib.contextmanager
def keep_torch_threads() -> Iterator[None]:
    """Restore torch's number of threads, because FFCV sets it to its own, and its import sets it to 1."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def require_ffcv() -> None:
    """Raise an InputError with installation advice if FFCV, which is optional, is missing."""
    try:
        with keep_torch_threads():
            import ffcv  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"FFCV is not installed ({error}): run `make ffcv`, or use a torch loader such as data=imagenet_folder"
        ) from error


def check_beton(path: Path) -> int:
    """Number of samples; raises if the file is missing or incomplete, because FFCV would crash on it or hang."""
    write = f"python -m datamodules.write_beton <image folder> {path}"
    if not path.is_file():
        raise InputError(f"expected a .beton file {path}, got none; write it: {write}")
    samples, problem = inspect_beton(path)
    if problem:
        raise InputError(f"{path} is not a whole .beton of images and labels: {problem}; write it again: {write}")
    return samples


def inspect_beton(path: Path) -> tuple[int, str | None]:
    """Number of samples, and the problem of the header, the fields or the image positions; None if there is none."""
    from ffcv import types

    size = path.stat().st_size
    if size < types.HeaderType.itemsize:
        return 0, f"expected a header of {types.HeaderType.itemsize} bytes, got a file of {size}"
    header = np.fromfile(path, types.HeaderType, count=1)[0]
    samples, num_fields, table = (int(header[name]) for name in ("num_samples", "num_fields", "alloc_table_ptr"))
    page = int(header["page_size"])
    if header["version"] != types.CURRENT_VERSION or page < 2 or page & (page - 1):
        return (
            samples,
            f"expected version {types.CURRENT_VERSION}, pages of 2^n bytes, got {header['version']}, pages of {page}",
        )
    cut = f"expected {samples} samples and a table of them at byte {table}, got a file of {size} bytes"
    fields_end = types.HeaderType.itemsize + num_fields * types.FieldDescType.itemsize
    if not fields_end < table < size or (size - table) % types.ALLOC_TABLE_TYPE.itemsize:
        return samples, cut
    fields = np.fromfile(path, types.FieldDescType, count=num_fields, offset=types.HeaderType.itemsize)
    kinds = {bytes(field["name"]).rstrip(b"\0").decode("ascii", "replace"): int(field["type_id"]) for field in fields}
    known = all(types.TYPE_ID_HANDLER.get(kind) for kind in kinds.values())
    if not known or (kinds.get("image"), kinds.get("label"), kinds.get("index", INT)) != (RGB_IMAGE, INT, INT):
        return samples, f"expected the fields image (kind {RGB_IMAGE}) and label (kind {INT}), got {kinds}"
    sample = types.get_metadata_type(types.get_handlers(fields))
    if not 0 < samples * sample.itemsize <= table - fields_end:
        return samples, cut
    stored = np.fromfile(path, sample, count=samples, offset=fields_end)[f"f{list(kinds).index('image')}"]
    return samples, image_problem(stored, np.fromfile(path, types.ALLOC_TABLE_TYPE, offset=table), table)


def image_problem(images: np.ndarray, regions: np.ndarray, end: int) -> str | None:
    """The problem as a text; None if each image has a region of its size and all regions end before byte `end`."""
    outside = int(((regions["ptr"] > end) | (regions["size"] > end - regions["ptr"])).sum())
    if outside:
        return f"expected all data before byte {end}, got {outside} regions that end after it"
    regions = regions[np.argsort(regions["ptr"])]
    region = np.searchsorted(regions["ptr"], images["data_ptr"]).clip(max=len(regions) - 1)
    wrong = regions["ptr"][region] != images["data_ptr"]
    raw_size = 3 * images["height"].astype(np.uint64) * images["width"]
    wrong |= (raw_size == 0) | (images["mode"] > 1) | ((images["mode"] == 1) & (raw_size != regions["size"][region]))
    return f"expected a place for every image, got {int(wrong.sum())} images without" if wrong.any() else None


class StoredImages:
    """Samples for FFCV's writer, by position: (image (H, W, 3) uint8, label, index).

    FFCV's writer would wait without end for a sample that raises. So a corrupt image becomes black and is marked in
    `corrupt`, for a check after writing. Unless corrupt images are skipped, all later images are black, to save time.
    """

    def __init__(self, files: ImageFiles, positions: Sequence[int], image_size: int, skip_corrupt: bool) -> None:
        self.files, self.positions, self.image_size, self.skip_corrupt = files, positions, image_size, skip_corrupt
        self.corrupt = multiprocessing.Array("b", len(positions))  # 1 where an image is corrupt
        self.failed = multiprocessing.Event()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        position = self.positions[index]
        image = np.zeros((1, 1, 3), dtype=np.uint8)
        if self.skip_corrupt or not self.failed.is_set():
            try:
                image = np.array(resize_short_side(read_image(self.files.path(position)), self.image_size))
            except CorruptImage:
                self.corrupt[index] = 1
                self.failed.set()
        return image, int(self.files.labels[position]), index


class WatchedProcess(multiprocessing.Process):
    """Keeps a list of the started processes, because multiprocessing forgets a process as soon as it has died."""

    started: ClassVar[list["WatchedProcess"]] = []

    def start(self) -> None:
        super().start()
        self.started.append(self)


@contextlib.contextmanager
def watched_processes() -> Iterator[None]:
    """Raise if a WatchedProcess dies in the block, because FFCV would wait for it. Main thread only."""
    WatchedProcess.started.clear()
    done = threading.Event()
    main_thread = threading.get_ident()

    def watch() -> None:
        while not done.wait(0.1):
            if any(process.exitcode for process in WatchedProcess.started):
                signal.pthread_kill(main_thread, signal.SIGUSR1)
                done.wait(1)  # then again: an exception inside a destructor or a tracer is lost

    def stop(number: int, frame: object) -> None:
        if not done.is_set():
            raise RuntimeError("a writing process died, its error stands above; is the disk full, or the memory?")

    earlier = signal.signal(signal.SIGUSR1, stop)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, earlier)
        for process in WatchedProcess.started:
            process.kill()  # the living ones wait for the dead one to write; no effect on finished ones


def write_samples(samples: StoredImages, out: Path, quality: int, workers: int) -> None:
    """Write all samples to the file `out` with FFCV."""
    from ffcv import writer
    from ffcv.fields import IntField, RGBImageField

    writer.Process = WatchedProcess
    fields = {"image": RGBImageField("jpg", jpeg_quality=quality), "label": IntField(), "index": IntField()}
    with watched_processes():
        writer.DatasetWriter(str(out), fields, num_workers=workers).from_indexed_dataset(samples, chunksize=32)


def write_beton(
    folder: str | Path,
    out: Path,
    image_size: int = 256,
    quality: int = 90,
    workers: int = 1,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> int:
    """Write the images of a class folder with a short side of `image_size` pixels; returns their number.

    The file has a temporary name until it is complete. That file is removed if writing fails.
    """
    require_ffcv()
    files = image_folder(folder, image_size, limit=limit)
    partial = out.with_name(out.name + ".partial")
    partial.unlink(missing_ok=True)  # left by a killed run, whose processes may still write to it
    positions = list(range(len(files)))
    try:
        while positions:
            samples = StoredImages(files, positions, image_size, skip_corrupt)
            write_samples(samples, partial, quality, workers)
            corrupt = [position for position, flag in zip(positions, samples.corrupt[:], strict=True) if flag]
            if not corrupt:
                check_beton(partial)
                os.replace(partial, out)
                return len(positions)
            for position in corrupt:
                report_corrupt(files.path(position), skip_corrupt)
            positions = sorted(set(positions) - set(corrupt))
        raise CorruptImage(f"expected at least 1 readable image in {folder}, got only corrupt ones")
    finally:
        partial.unlink(missing_ok=True)


def report_corrupt(path: Path, skip_corrupt: bool) -> None:
    """Warn about a corrupt image if it is skipped; raise otherwise."""
    try:
        read_image(path)
    except CorruptImage as error:
        if not skip_corrupt:
            raise
        warnings.warn(f"left out: {error}", stacklevel=2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write class folders of images as one .beton file, which FFCV reads.")
    parser.add_argument("folder", help="holds one subfolder of images per class")
    parser.add_argument("out", type=Path, help="the .beton file")
    parser.add_argument("--image-size", type=int, default=256, help="short side of the stored images (256)")
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, 1 to 100 (90)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (one per core)")
    parser.add_argument("--limit", type=int, help="maximum number of images, spread evenly over the classes")
    parser.add_argument("--skip-corrupt", action="store_true", help="leave out images that cannot be decoded")
    options = parser.parse_args(arguments)
    try:
        count = write_beton(**vars(options))
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{options.out}: {count} images, {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
