"""The folder of a run: its name, where it is, and that only one command at a time writes to it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.running.signals import LOCKED, is_first_process
from explainers.saved.files import file_name, write_atomically


def folder_name(path: str | None) -> str:
    """A name for a run, from the name of the folder of its images; `images` if they have no common folder.

    >>> folder_name("my/flowers/"), folder_name(None)
    ('flowers', 'images')
    """
    return file_name(Path(path).resolve().name) if path else "images"


def data_name(choice: str, *, _root_: DictConfig) -> str:
    """A name for the chosen file of configs/data; where this reads any data set, that of the data set or its folder."""
    if choice in ("folder", "unlabelled"):
        return folder_name(_root_.data.root)
    return str(_root_.data.name) if choice == "torchvision" else choice


def run_name(name: str) -> str:
    """The name of a run for W&B: that of the config; of a job of a sweep, with what tells it from the other jobs."""
    hydra = HydraConfig.get()
    if OmegaConf.is_missing(hydra.job, "num"):
        return name
    return hydra.sweep.subdir if hydra.sweep.subdir.startswith(name) else f"{name}/{hydra.sweep.subdir}"


for resolver in (file_name, folder_name, data_name, run_name):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def quote(value: str | Path) -> str:
    """A text as Hydra reads it in an override.

    >>> print(quote("it's here"))
    'it\\'s here'
    """
    return "'" + str(value).replace("'", r"\'") + "'"


def run_dir() -> Path:
    """Output folder of this run, or of this job of a sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def shorten_path(path: Path) -> Path:
    """The path relative to the working directory if it lies inside it, otherwise unchanged.

    >>> shorten_path(Path.cwd() / "runs" / "tve").as_posix()
    'runs/tve'
    """
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder, so that no other command writes to it at the same time.

    The lock ends with this process, even if it is killed. Processes that this one starts work under the same lock; of
    those that torchrun or SLURM start, the first one takes it.

    Raises:
        InputError: if another command has locked the folder; the message names its process and machine.
    """
    if not is_first_process() or os.environ.get(LOCKED) == str(folder):
        yield
        return
    lock, holder = FileLock(folder / ".lock", blocking=False), folder / ".locked_by"
    try:
        lock.acquire()
    except Timeout:
        who = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
        raise InputError(
            f"{folder} is in use by {who}: wait until that command ends, or give this run its own name (name=...)"
        ) from None
    try:
        write_atomically(holder, f"process {os.getpid()} on {socket.gethostname()}")
        os.environ[LOCKED] = str(folder)
        yield
    finally:
        os.environ.pop(LOCKED, None)
        holder.unlink(missing_ok=True)
        lock.release()
