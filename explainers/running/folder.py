"""The folder of a run: where it is, and that only one command at a time writes to it."""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.running.messages import DENIED, MENDED_BY
from explainers.running.signals import LOCKED, is_first_process
from explainers.saved.files import file_name, write_atomically


def folder_name(path: str | None) -> str:
    """A name for a run, from the name of the folder of its images; `images` if they have no common folder.

    >>> folder_name("my/flowers/"), folder_name(None)
    ('flowers', 'images')
    """
    return file_name(Path(path).resolve().name) if path else "images"


OmegaConf.register_new_resolver("file_name", file_name, replace=True)
OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)


class WritableFolder(Callback):
    """Hydra's callback that exits with one line if the run's folder cannot be written to, before Hydra logs there."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)  # Hydra itself does so later; names of runs interpolate it
        folder = Path(config.hydra.run.dir).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            sys.exit(f"error: cannot write to {folder}: {error.strerror}: {MENDED_BY.get(error.errno or 0, DENIED)}")


def run_dir() -> Path:
    """Output folder of this run, or of this job of a sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def relative(path: Path) -> Path:
    """The path relative to the working directory if it lies inside it, otherwise unchanged.

    >>> relative(Path.cwd() / "runs" / "tve").as_posix()
    'runs/tve'
    """
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder, so that no other command writes to it at the same time.

    The lock ends with this process, even if it is killed. Processes that this one starts work under the same lock. Of
    the processes that torchrun or SLURM start, only the first one takes it.

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
        who = holder.read_text() if holder.exists() else "another process"
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
