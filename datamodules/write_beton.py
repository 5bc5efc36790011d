"""Write class folders of images to a .beton file, which FFCV reads, and its class names to a file beside it.

    python -m datamodules.write_beton data/imagenet/train data/imagenet/train.beton --model vit_small_patch16_224

The samples and their order are those of `folders.image_folder`. What the model sees of the images is stored as JPEG, so
that the FFCV loader only has to decode. train.beton.json names the classes, the source and the settings.
"""

import argparse
import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from datamodules.beton import describe, require_ffcv
from datamodules.datasets import ImageFiles, choose_transform
from datamodules.folders import image_folder
from explainers.errors import check_positive, check_range
from explainers.images.decoding import CorruptImage, read_image
from explainers.images.transform import ImageTransform
from explainers.models import TargetModel
from explainers.models.fetching import create_model
from explainers.saved.files import atomic


class StoredImages:
    """Samples for FFCV's writer, by position: (image (H, W, 3) uint8, label, index).

    FFCV's writer waits forever if a sample raises an exception. An image that cannot be read is therefore stored as a
    black one, and marked in `unreadable` for a check after writing. Unless `skip_corrupt`, all images after it are
    black, to save time.
    """

    def __init__(self, files: ImageFiles, positions: Sequence[int], skip_corrupt: bool) -> None:
        self.files = files
        self.positions = positions
        self.skip_corrupt = skip_corrupt
        self.unreadable = multiprocessing.Array("b", len(positions))  # 1 where an image cannot be read
        self.failed = multiprocessing.Event()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        position = self.positions[index]
        image = np.zeros((1, 1, 3), dtype=np.uint8)
        if not self.failed.is_set():
            try:
                image = np.array(self.files.transform.show(read_image(self.files.path(position))))
            except CorruptImage:
                self.unreadable[index] = 1
                if not self.skip_corrupt:
                    self.failed.set()
        return image, int(self.files.labels[position]), index


class WatchedProcess(multiprocessing.Process):
    """Keeps a list of the started processes, because multiprocessing forgets a process as soon as it has died."""

    started: ClassVar[list["WatchedProcess"]] = []

    def start(self) -> None:
        super().start()
        self.started.append(self)

    def run(self) -> None:
        """Write samples; on an error of the disk, exit with the number of the error and without a traceback.

        This process ignores Ctrl-C; the main process ends it.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the main process ends this one
        try:
            super().run()
        except OSError as error:
            os._exit(error.errno or 1)


@contextlib.contextmanager
def watch_processes(out: Path) -> Iterator[None]:
    """Raise if a WatchedProcess dies in the block, because FFCV would wait for it forever. For the main thread only.

    Args:
        out: the file that the processes write, for the message.
    """
    WatchedProcess.started.clear()
    done = threading.Event()
    main_thread = threading.get_ident()

    def watch() -> None:
        while not done.wait(0.1):
            if any(process.exitcode for process in WatchedProcess.started):
                signal.pthread_kill(main_thread, signal.SIGUSR1)
                done.wait(1)  # then signal again: an exception inside a destructor or a tracer is lost

    def stop(number: int, frame: object) -> None:
        if not done.is_set():
            code = next(process.exitcode for process in WatchedProcess.started if process.exitcode)
            if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(code, os.strerror(code), str(out))
            raise RuntimeError("a process that writes samples died; its error is printed above, or memory is full")

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
            process.kill()  # living ones wait for the dead one; finished ones are not affected
        # `stop` may have interrupted FFCV's progress bar as it took its lock: later forks would wait for it forever
        tqdm.set_lock(threading.RLock())


def write_samples(samples: StoredImages, out: Path, quality: int, workers: int) -> None:
    """Write all samples to the file `out` with FFCV."""
    from ffcv import writer
    from ffcv.fields import IntField, RGBImageField

    writer.Process = WatchedProcess
    fields = {"image": RGBImageField("jpg", jpeg_quality=quality), "label": IntField(), "index": IntField()}
    with watch_processes(out):
        writer.DatasetWriter(str(out), fields, num_workers=workers).from_indexed_dataset(samples, chunksize=32)


def write_beton(
    folder: str | Path,
    out: Path,
    transform: ImageTransform,
    quality: int = 90,
    workers: int = 1,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> int:
    """Write what a transform shows of the images of a class folder; return their number.

    The file has a temporary name until it and its description are complete. It is removed if writing fails; the next
    run overwrites what a killed one left.
    """
    check_range(1, 100, quality=quality)
    check_positive(workers=workers)
    require_ffcv()
    files = image_folder(folder, transform, limit=limit)
    settings = {"transform": asdict(transform), "quality": quality, "limit": limit, "skip_corrupt": skip_corrupt}
    with atomic(out, alone=True) as unfinished:
        count = write_readable(files, unfinished, quality, workers, skip_corrupt)
        with open(unfinished, "r+b") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only now
        # Before the file gets its name: if this run is killed in between, the description fits no file, and is refused
        describe(unfinished, out, files.classes, files.fingerprint(), settings)
    return count


def write_readable(files: ImageFiles, unfinished: Path, quality: int, workers: int, skip_corrupt: bool) -> int:
    """Write all readable images; return their number. Raise if one cannot be read, unless `skip_corrupt`."""
    positions = list(range(len(files)))
    while positions:
        samples = StoredImages(files, positions, skip_corrupt)
        write_samples(samples, unfinished, quality, workers)
        unreadable = [position for position, flag in zip(positions, samples.unreadable[:], strict=True) if flag]
        if not unreadable:
            return len(positions)
        for position in unreadable:
            report_unreadable(files.path(position), skip_corrupt)
        positions = sorted(set(positions) - set(unreadable))
    raise CorruptImage(f"expected at least 1 readable image, got {len(files)} corrupt ones; repair or replace them")


def report_unreadable(path: Path, skip_corrupt: bool) -> None:
    """Warn about a corrupt image if it is skipped; raise otherwise."""
    try:
        read_image(path)
    except CorruptImage as error:
        if not skip_corrupt:
            raise CorruptImage(f"{error}; repair or delete the file, or leave it out (--skip-corrupt)") from error
        warnings.warn(f"left out: {error}", stacklevel=2)


def end(number: int, frame: object) -> None:
    """Remove the unfinished file and exit, after SIGINT, SIGTERM or SIGHUP. A second Ctrl-C exits at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    name = signal.Signals(number).name
    os.write(2, f"{name}: stopped, nothing was written; the same command starts again\n".encode())
    sys.exit(128 + number)


def find_transform(model: str, crop_fraction: float | None) -> ImageTransform:
    """The transform of a model of timm, or the crops in its place, see `choose_transform`."""
    with torch.device("meta"):
        backbone = create_model(model, pretrained=False)
    return choose_transform(TargetModel(backbone, nn.Identity()).transform, crop_fraction)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write class folders of images as one .beton file, which FFCV reads.")
    parser.add_argument("folder", help="holds one subfolder of images per class")
    parser.add_argument("out", type=Path, help="the .beton file")
    parser.add_argument("--model", required=True, help="name in timm of the target, whose image transform is applied")
    parser.add_argument("--crop-fraction", type=float, help="store the middle crop of this fraction, as crop_fraction=")
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, 1 to 100 (90)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (one per core)")
    parser.add_argument("--limit", type=int, help="maximum number of images, spread evenly over the classes")
    parser.add_argument("--skip-corrupt", action="store_true", help="leave out images that cannot be decoded")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # which nohup sets
            signal.signal(number, end)
    try:
        transform = find_transform(options.model, options.crop_fraction)
        given = {key: value for key, value in vars(options).items() if key not in ("model", "crop_fraction")}
        count = write_beton(**given, transform=transform)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{options.out}: {count} images, {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
