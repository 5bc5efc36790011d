"""The commands that `faults.py` disturbs, what they need, and what undisturbed ones leave."""

import importlib
import os
import random
import runpy
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from commands import QUIET, ROOT, SMALL_DIGITS, TINY_RUN, composed, draw_images
from fault_forks import Started, Work
from fault_results import Torn, differences, parts
from hydra.utils import instantiate
from safetensors.torch import save_file

from datamodules import write_beton

WARM = "callbacks.heatmaps callbacks.throughput contourpy datamodules.cached datamodules.digits datamodules.folders"
WARM += " explainers.report.figures explainers.tve explainers.training scipy.spatial"
WARM += " matplotlib.figure matplotlib.backends.backend_agg sklearn.datasets ffcv"
"""Modules that a command imports late; they are imported before the first fork. FFCV may be missing."""


@dataclass(frozen=True)
class Job:
    """A command that reads files in the folder `inputs` of its place, and writes elsewhere in its place.

    Args:
        name: name in tables.
        work: runs the command in this process, in a folder: its place.
        needs: names of the files and folders in `inputs`.
    """

    name: str
    work: Work
    needs: tuple[str, ...] = ()


def program(name: str, *overrides: str) -> Work:
    """`python <name> *overrides`; `{place}` in an override stands for the place."""

    def work(place: Path) -> None:
        os.chdir(ROOT)
        sys.argv = [name, *(text.replace("{place}", str(place)) for text in overrides), f"hydra.run.dir={place}/run"]
        runpy.run_path(name, run_name="__main__")

    return work


def write(place: Path) -> None:
    """`python -m datamodules.write_beton`, with two processes that write."""
    options = ("--workers", "2", "--image-size", "48")
    write_beton.main([str(place / "inputs/images/train"), str(place / "images.beton"), *options])


TASKS = ("odd", "loop")
DIGITS = (*SMALL_DIGITS, "trainer.log_every_n_steps=1")
ON_TARGET = ("target=tiny", "target.model.checkpoint_path={place}/inputs/target.safetensors")
ONE_PICTURE = ("module.loss.patches_per_image=2", "callbacks.heatmaps.images=1", "callbacks.check=null")
TVE = (*TINY_RUN, *DIGITS, *ON_TARGET, *ONE_PICTURE)
FROM_FILES = (
    *("explainers@explainer=tve", "explainer.network.width=24", "explainer.hops=[1]", "logger=csv", *QUIET, *ON_TARGET),
    *("trainer.max_epochs=1", "data.batch_size=8", "data.num_workers=1", *ONE_PICTURE),
)
MEASURED = (
    *("experiment=quickstart_eval", *ON_TARGET, "~tasks.five_or_more", "evaluation.levels=3", *QUIET),
    *(
        "pictures.images=1",
        "figures=[bars]",
        "~explainers.tve_untrained",
        "~explainers.anyhead",
        "explainers.tve.network.width=24",
    ),
    *("explainers.tve.weights={place}/inputs/explainer.safetensors", "explainers.oracle.cache_dir={place}/oracle"),
    *(f"tasks.{task}.target.head={{place}}/inputs/head.safetensors" for task in TASKS),
    *(f"tasks.{task}.data.{size}" for task in TASKS for size in ("size.test=4", "eval_batch_size=2")),
)
LIST = (
    Job(
        "target",
        program("train.py", "experiment=quickstart_target", "target=tiny", "trainer.max_epochs=3", *DIGITS, *QUIET),
    ),
    Job("training", program("train.py", *TVE, "cache=none", "trainer.max_epochs=3"), ("target.safetensors",)),
    Job(
        "store",
        program(
            *("train.py", *TVE, "cache=sources", "cache_dir={place}/cache", "cache.batch_size=2"),
            *("trainer.max_epochs=1", "data.size.train=32"),
        ),
        ("target.safetensors",),
    ),
    Job("beton", write, ("images",)),
    Job(
        "evaluation", program("eval.py", *MEASURED), ("target.safetensors", "explainer.safetensors", "head.safetensors")
    ),
    Job(
        "image folder",
        program("train.py", *FROM_FILES, "data=folder", "data.root={place}/inputs/images"),
        ("target.safetensors", "images"),
    ),
    Job(
        "FFCV",
        program(
            *("train.py", *FROM_FILES, "data=imagenet"),
            *(f"data.{split}={{place}}/inputs/beton/images.beton" for split in ("train", "val")),
        ),
        ("target.safetensors", "beton"),
    ),
)
JOBS = {job.name: job for job in LIST}

MADE_BY = {
    "explainer.safetensors": ("training", "run/explainer.safetensors"),
    "beton": ("beton", "images.beton*"),
}
"""What a job needs and another job makes → that job, and the pattern of its files."""


class Lab:
    """Makes places for commands, and knows what undisturbed ones leave.

    Args:
        root: folder of all places.
        seed: seed of the moments of kills.
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self.random = root, random.Random(seed)
        self.references: dict[str, SimpleNamespace] = {}
        for name in WARM.split():
            with suppress(ImportError):
                importlib.import_module(name)

    def place(self, job: Job, copied: Path | None = None) -> Path:
        """Empty the place of all commands, and copy to it what a job needs, or all that another folder has.

        There is only one, because a command refuses to go on with a run whose files are named otherwise.
        """
        for name in job.needs:
            self.need(name)
        place = self.root / "place"
        shutil.rmtree(place, ignore_errors=True)
        if copied is not None:
            return Path(shutil.copytree(copied, place))
        place.mkdir()
        return self.fill(job, place)

    def fill(self, job: Job, place: Path) -> Path:
        """Copy what a job needs to a place."""
        for name in job.needs:
            made = self.root / "needed" / name
            (place / "inputs").mkdir(exist_ok=True)
            (shutil.copytree if made.is_dir() else shutil.copy)(made, place / "inputs" / name)
        return place

    def need(self, name: str) -> None:
        """Make a file or a folder that jobs need, if it is not there."""
        path = self.root / "needed" / name
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        if name == "images":
            draw_images(path / "train", count=48), draw_images(path / "val", count=8)
        elif name == "target.safetensors":
            torch.manual_seed(0)
            save_file(instantiate(composed("target=tiny", folder=self.root).target.model).state_dict(), path)
        elif name == "head.safetensors":
            weight = torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
            save_file({"weight": weight, "bias": torch.zeros(2)}, path)
        else:
            maker, pattern = MADE_BY[name]
            files = list(self.reference(JOBS[maker]).place.glob(pattern))
            if name == "beton":
                path.mkdir()  # with all that lies next to the file
            for file in files:
                shutil.copy(file, path)

    def reference(self, job: Job) -> SimpleNamespace:
        """Place, results and seconds of an undisturbed command."""
        if job.name not in self.references:
            place, start = self.place(job), time.monotonic()
            ending = Started(job.work, place).ending()
            seconds = time.monotonic() - start
            assert ending.code == 0, f"{job.name} fails undisturbed:\n{ending.output}"
            kept = place.rename(self.root / f"undisturbed {job.name}")
            self.references[job.name] = SimpleNamespace(place=kept, results=parts(kept), seconds=seconds)
        return self.references[job.name]

    def losses(self, job: Job, place: Path, whole: bool, when: str) -> list[str]:
        """What is wrong in a place, if anything; see `differences`."""
        try:
            wrong = differences(parts(place), self.reference(job).results, whole)
        except Torn as torn:
            return [f"{when}, half-written: {torn}"]
        return [f"{when}, other results: {', '.join(wrong[:3])}{' ...' * (len(wrong) > 3)}"] if wrong else []

    def losses_again(self, job: Job, place: Path) -> list[str]:
        """What is lost after the same command has run to its end."""
        ending = Started(job.work, place).ending()
        if ending.code != 0:
            return [f"cannot go on: {ending.output.strip()[-300:]}"]
        return self.losses(job, place, True, "at the end")
