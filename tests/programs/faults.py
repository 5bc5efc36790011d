"""Disturb commands by kills, full disks, missing permissions and damaged files, and count what is lost.

    python tests/programs/faults.py --kills 20

A round is lost if something half-written is taken for whole, if the command does not say in one line what is wrong, or
if its results are not those of an undisturbed command after it has run again. Each command is a fork of this process,
because a new process would import for longer than the command works. The exit code is 1 if a round is lost.
"""

import argparse
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as `pythonpath` in setup.cfg
sys.path.insert(0, str(Path(__file__).parents[2]))

from fault_forks import Ending, Started, give_up_rights
from fault_jobs import JOBS, Job, Lab
from fault_results import unfinished

SHARES = {"half": 0.5, "empty": 0.0, "gone": None}
"""What is left of a damaged file: a share of its bytes, or no file."""

FILLER = ".filler"
"""A file on a full disk; when it is removed, the disk has room again."""

DAMAGED = {
    "training": "run/checkpoints/last.ckpt run/metrics.json run/config.yaml run/versions.json run/explainer.safetensors"
    " run/csv/version_0/metrics.csv inputs/target.safetensors home/*/hashes.sqlite",
    "store": "cache/*/*/key.json cache/*/*/done.npy cache/*/*/meta.npy cache/*/*/patch.npy cache/*/*/embedding.npy",
    "evaluation": "run/results.json oracle/*.safetensors inputs/head.safetensors inputs/explainer.safetensors"
    " inputs/target.safetensors",
    "image folder": "inputs/images/train/cat/0.jpg",
    "beton": "inputs/images/train/cat/0.jpg images.beton images.beton.*",
    "FFCV": "inputs/beton/images.beton inputs/beton/images.beton.*",
}
"""Job → the files that it reads, as patterns. Of several that match, the first one is damaged."""


@dataclass
class Row:
    """What a fault did to a job: rounds, descriptions of lost rounds, seconds, and what else happened how often."""

    job: str
    fault: str
    rounds: int = 0
    lost: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        notes = ", ".join(f"{count} × {note}" if count > 1 else note for note, count in Counter(self.notes).items())
        return f"| {self.job} | {self.fault} | {self.rounds} | {len(self.lost)} | {self.seconds:.0f} | {notes} |"

    @contextmanager
    def round(self, what: str) -> Iterator[list[str]]:
        """Count a round, which is lost if the list that it gets is not empty at its end."""
        start, lost = time.monotonic(), list[str]()
        yield lost
        self.seconds += time.monotonic() - start
        self.rounds += 1
        self.lost += [f"{self.job}, {self.fault}, {what}: {'; '.join(lost)}"] if lost else []


def kills(lab: Lab, job: Job, count: int) -> Row:
    """SIGKILL at random moments, in every second round twice; then the same command runs to its end."""
    row, seconds = Row(job.name, "kill -9"), lab.reference(job).seconds
    while row.rounds < count:
        place, moment = lab.place(job), lab.random.uniform(0, seconds)
        if not Started(job.work, place).kill(moment):
            continue  # this time it was faster
        with row.round(f"{moment:.2f} s after the start") as lost:
            lost += lab.losses(job, place, False, "after the kill")
            if row.rounds % 2 == 0:
                again = Started(job.work, place).kill(lab.random.uniform(0, seconds))
                row.notes += ["killed again"] * again
                lost += lab.losses(job, place, False, "after the second kill")
            lost += lab.losses_again(job, place)
            row.notes += ["unfinished files stayed"] * any(map(unfinished, place.rglob("*.*")))
    return row


def sizes(lab: Lab, job: Job, count: int) -> list[int]:
    """One byte less than `count` files that the undisturbed command has written, or fewer, with the largest."""
    place = lab.reference(job).place
    files = [path for path in place.rglob("*") if path.is_file() and not unfinished(path)]
    own = [path for path in files if path.relative_to(place).parts[0] not in ("inputs", "home")]
    found = sorted({max(0, path.stat().st_size - 1) for path in own}, reverse=True)
    return found[:: -(-len(found) // count)]


def file_limits(lab: Lab, job: Job, limits: Iterable[int]) -> Row:
    """No file may grow above a limit, in bytes."""
    row = Row(job.name, "full disk (RLIMIT_FSIZE)")
    lab.reference(job)  # it takes the place
    for limit in limits:
        place = lab.place(job)
        with row.round(f"files of at most {limit} bytes") as lost:
            ending = Started(job.work, place, partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, -1))).ending()
            lost += refused(ending) + lab.losses(job, place, False, "on the full disk")
            lost += lab.losses_again(job, place)
    return row


def refused(ending: Ending, name: str = "") -> list[str]:
    """What is wrong with the ending of a command that should have ended with one line that contains a name."""
    if ending.line is None:
        return [f"exit code {ending.code}, no single line: ...{ending.output.strip()[-400:]}"]
    return [] if name in ending.line else [f"{name} is not named: {ending.line}"]


def full_disks(lab: Lab, job: Job, count: int) -> Row:
    """A disk of its own, on which less is free than the undisturbed command has written."""
    row, reference = Row(job.name, "full disk (tmpfs)"), lab.reference(job)
    used = sum(path.stat().st_blocks * 512 for path in reference.place.rglob("*"))
    used -= sum(path.stat().st_blocks * 512 for path in (reference.place / "inputs").rglob("*"))
    for i in range(count):
        place, free = lab.place(job), used * i // count
        try:
            mount(place, job, lab, free)
        except (OSError, subprocess.CalledProcessError):
            row.notes.append("not possible: cannot mount a tmpfs")
            return row
        try:
            with row.round(f"{free} bytes free of {used}") as lost:
                ending = Started(job.work, place).ending()
                lost += refused(ending) + lab.losses(job, place, False, "on the full disk")
                (place / FILLER).unlink()
                lost += lab.losses_again(job, place)
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)
    return row


def mount(place: Path, job: Job, lab: Lab, free: int) -> None:
    """Mount a disk on a place, with what the job needs and so many free bytes, which removing `FILLER` increases."""
    size = 128 * 2**20
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True, capture_output=True)
    lab.fill(job, place)
    with open(place / FILLER, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(place).free - free))


def read_only(lab: Lab, job: Job, before: Iterable[str] = ("new", "finished")) -> Row:
    """No folder and no file may be written to, before the command was ever started, or after it has ended."""
    row, reference = Row(job.name, "read-only folder"), lab.reference(job)
    for what in before:
        place = lab.place(job, None if what == "new" else reference.place)
        with row.round(what) as lost:
            everything = [place, *place.rglob("*")]
            for path in everything:
                path.chmod(0o555 if path.is_dir() else 0o444)
            ending = Started(job.work, place, give_up_rights).ending()
            for path in everything:
                path.chmod(0o755 if path.is_dir() else 0o644)
            lost += refused(ending, str(place)) + lab.losses(job, place, False, "in the read-only folder")
            lost += lab.losses_again(job, place)
    return row


def damage(lab: Lab, job: Job, pattern: str, shares: Mapping[str, float | None] = SHARES) -> Row:
    """A file that the command reads has lost its second half, or all of its content, or is gone."""
    row, top = Row(job.name, f"damaged `{pattern}`"), pattern.partition("/")[0]
    for what, share in shares.items():
        if share is None and pattern.startswith("inputs/images/"):
            continue  # other images give other results
        place = lab.place(job, None if top == "inputs" else lab.reference(job).place)
        if top in ("cache", "oracle", "home"):  # read by a new run
            shutil.rmtree(place / "run")
        path = next(iter(sorted(place.glob(pattern))), None)
        if path is None:
            row.notes.append("there is no such file")
            return row
        with row.round(what) as lost:
            if share is None:
                path.unlink()
            else:
                os.truncate(path, int(path.stat().st_size * share))
            ending = Started(job.work, place).ending()
            if ending.code == 0:
                lost += lab.losses(job, place, not pattern.endswith(".csv"), "without an error")
            else:
                lost += refused(ending, str(path))
            row.notes.append(f"{what}: {'LOST' if lost else 'one line' if ending.code else 'same results'}")
    return row


FAULTS: dict[str, Callable[[Lab, Job, argparse.Namespace], Iterable[Row]]] = {
    "kill": lambda lab, job, options: [kills(lab, job, options.kills)],
    "disk": lambda lab, job, options: [
        full_disks(lab, job, options.disks),
        file_limits(lab, job, sizes(lab, job, options.disks)),
    ],
    "read-only": lambda lab, job, options: [read_only(lab, job)],
    "damage": lambda lab, job, options: (damage(lab, job, pattern) for pattern in DAMAGED.get(job.name, "").split()),
}
"""Name on the command line → the rows of a job."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Disturb commands, and count what is lost.")
    parser.add_argument("--kills", type=int, default=20, help="rounds with kills of each job (20)")
    parser.add_argument("--disks", type=int, default=6, help="full disks of each kind for each job (6)")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT", help="all four")
    parser.add_argument("--seed", type=int, default=0, help="determines the moments of the kills (0)")
    parser.add_argument("--folder", type=Path, help="where the commands run (a temporary folder)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="faults_", dir=options.folder) as root:
        lost = table(Lab(Path(root), options.seed), options)
    print(*("", f"{len(lost)} rounds lost", *(f"- {text}" for text in lost)), sep="\n")
    sys.exit(bool(lost))


def table(lab: Lab, options: argparse.Namespace) -> list[str]:
    """Print a row for each fault of each job; returns descriptions of all lost rounds."""
    print("| job | fault | rounds | lost | seconds | |\n|---|---|---|---|---|---|", flush=True)
    lost: list[str] = []
    for name in options.jobs:
        for fault in options.faults:
            if fault != "damage" and name in ("image folder", "FFCV"):
                continue  # they write what the job `training` writes
            if name in ("beton", "FFCV") and importlib.util.find_spec("ffcv") is None:
                print(f"| {name} | {fault} | 0 | 0 | 0 | not possible: FFCV is not installed (make ffcv) |")
                continue
            for row in FAULTS[fault](lab, JOBS[name], options):
                print(row, flush=True)
                lost += row.lost
    return lost


if __name__ == "__main__":
    main()
