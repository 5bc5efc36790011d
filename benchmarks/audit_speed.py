"""What collecting the evidence of an audit costs beside plain inference: time and memory, after kills and by processes.

    python benchmarks/audit_speed.py data/imagenet_val/images --model vit_tiny_patch16_224.augreg_in21k_ft_in1k

Images are copies of those of the folder. For the first `--timed` ones, plain inference (the embedding and the head) and
the evidence are computed in turn, batch by batch, so that other work on the machine slows both alike; the time is that
of the processor. A process is killed after its first shard and goes on, and two processes share the work: both have to
write the same bytes as one process. Memory is the peak of a process that collects a tenth of the images, and all.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from explainers.app.audited_photos import make_source
from explainers.app.photos import Photo, list_photos
from explainers.app.session import Session
from explainers.auditing.evidence import take_evidence
from explainers.auditing.store import EvidenceStore

WARM = 3
"""Number of batches that are not counted: the first ones get their memory from the system, which takes time."""

FEW = 160
"""Number of images of the runs that are killed or shared, and of their shards a quarter."""


def copies(folder: str, count: int) -> list[Photo]:
    """So many photos, of which each is one of the folder."""
    photos = list_photos(folder)
    return [
        replace(photos[i % len(photos)], name=f"{i // len(photos)}/{photos[i % len(photos)].name}")
        for i in range(count)
    ]


@torch.no_grad()
def compare_times(session: Session, photos: Sequence[Photo], strongest: int) -> dict[str, float]:
    """Milliseconds of the processor for each image: of decoding, plain inference, and evidence."""
    taken = {"decoding": 0.0, "plain": 0.0, "evidence": 0.0}
    count = -(-len(photos) // session.batch_size)
    images = len(photos) - WARM * session.batch_size

    def measure(name: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        if number >= WARM:
            taken[name] += 1e3 * (time.process_time() - start) / images
        return result

    batches = iter(make_source(session, photos, torch.full((len(photos),), -1)).batches(range(len(photos))))
    for number in range(count):
        pixels, numbers = measure("decoding", lambda: next(batches))
        labels = torch.full((len(numbers),), -1)
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("plain", partial(session.target, pixels)),
            ("evidence", partial(take_evidence, session.explainer, pixels, labels, strongest)),
        ]
        for name, call in calls if number % 2 else calls[::-1]:
            measure(name, call)
    return taken


def collect(options: argparse.Namespace, session: Session) -> None:
    """Collect the evidence of some images into a folder; print the peak memory of this process in MiB."""
    photos = copies(options.folder, options.images)
    source = make_source(session, photos, torch.full((len(photos),), -1))
    EvidenceStore(options.collect, options.shard_size).collect(session.explainer, source, options.strongest)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")


def start(options: argparse.Namespace, folder: Path, images: int, shard: int, rank: int = 0, processes: int = 1) -> Any:
    """Start this program as a process that collects."""
    command = [sys.executable, __file__, options.folder, "--model", options.model, "--method", options.method]
    command += ["--weights", options.weights] if options.weights else []
    command += ["--images", str(images), "--strongest", str(options.strongest), "--threads", str(options.threads)]
    command += ["--collect", str(folder), "--shard-size", str(shard)]
    own = dict(environ) | {"RANK": str(rank), "WORLD_SIZE": str(processes)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own)


def measure_memory(options: argparse.Namespace, folder: Path, images: int) -> tuple[int, float, int]:
    """Peak memory in MiB, wall time in seconds and bytes on disk of one process that collects."""
    begin = time.perf_counter()
    said, _ = start(options, folder, images, options.shard_size).communicate()
    return int(said), time.perf_counter() - begin, sum(map(len, files(folder).values()))


def files(folder: Path) -> dict[str, bytes]:
    """The shards in a folder."""
    return {path.name: path.read_bytes() for path in (folder / "evidence").glob("[0-9]*")}


def compare_interrupted(options: argparse.Namespace, folder: Path) -> tuple[bool, bool]:
    """Whether a killed process that goes on, and two processes, write the same bytes as one process."""
    start(options, folder / "whole", FEW, FEW // 4).communicate()
    killed = start(options, folder / "killed", FEW, FEW // 4)
    while not files(folder / "killed"):
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    left = len(files(folder / "killed"))
    start(options, folder / "killed", FEW, FEW // 4).communicate()
    pair = [start(options, folder / "pair", FEW, FEW // 4, rank, 2) for rank in range(2)]
    for process in pair:
        process.communicate()
    whole = files(folder / "whole")
    return left < len(whole) and files(folder / "killed") == whole, files(folder / "pair") == whole


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What collecting the evidence of an audit costs.")
    parser.add_argument("folder", help="images")
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k", help="name of timm")
    parser.add_argument("--weights", help="file of its weights (those of timm)")
    parser.add_argument("--method", default="auto", help="an explainer with vectors")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--timed", type=int, default=480, help="images whose time is measured")
    parser.add_argument("--strongest", type=int, default=40, help="patches of an image")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--collect", help=argparse.SUPPRESS)  # what `start` starts
    parser.add_argument("--shard-size", type=int, default=1024, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    session = Session(options.model, options.method, options.weights)
    if options.collect:
        return collect(options, session)
    taken = compare_times(session, copies(options.folder, options.timed), options.strongest)
    decoding, plain, evidence = taken.values()
    print(f"{options.timed} images: decoding {decoding:.2f}, plain {plain:.2f}, evidence {evidence:.2f} ms per image")
    print(f"evidence / plain: {evidence / plain:.3f}, with decoding {(decoding + evidence) / (decoding + plain):.3f}")
    with tempfile.TemporaryDirectory() as folder:
        killed, shared = compare_interrupted(options, Path(folder))
        print(f"the bytes of one process: after a kill {killed}, by two processes {shared}", flush=True)
        for images in (options.images // 10, options.images):
            peak, seconds, size = measure_memory(options, Path(folder, str(images)), images)
            print(
                f"{images} images: peak {peak} MiB, {seconds:.0f} s, {size / images / 1e3:.2f} kB per image", flush=True
            )


if __name__ == "__main__":
    main()
