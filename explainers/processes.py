"""The processes of one command, and the lock that keeps two commands from writing to one folder."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from explainers.errors import InputError
from explainers.files import write_atomically

OF_SWEEPS_AND_FOLDERS = ("hydra.mode", "hydra.sweep", "hydra/sweep", "hydra.launcher", "hydra/launcher", "hydra.run.")
"""Beginnings of the overrides of Hydra's own config that a process of one run does not need."""

LOCKED = "EXPLAINERS_LOCKED_FOLDER"
"""Environment variable with the folder that this process or one of its parents has locked."""


def arguments(config: Any, folder: Path) -> list[str]:
    """Command-line arguments with which another process composes the config of this run, or of this job of a sweep.

    They name the config files that the user's flags have named, and repeat all overrides except those that choose the
    sweep and the folder.

    Args:
        config: Hydra's own config of this run.
        folder: the run's folder.
    """
    flags = {"main": "--config-path", "command-line": "--config-dir"}
    places = [
        f"{flags[source.provider]}={'' if source.schema == 'file' else source.schema + '://'}{source.path}"
        for source in config.runtime.config_sources
        if source.provider in flags
    ]
    of_hydra = [text for text in config.overrides.hydra if not text.lstrip("+~").startswith(OF_SWEEPS_AND_FOLDERS)]
    if config.mode.name == "MULTIRUN":
        of_hydra.append(f"hydra.job.num={config.job.num}")  # a config may contain it
    quoted = str(folder).replace("'", r"\'")
    own = ["hydra.mode=RUN", f"hydra.run.dir='{quoted}'"]
    return [f"--config-name={config.job.config_name}", *places, *config.overrides.task, *of_hydra, *own]


def torchrun(processes: int, program: Sequence[str]) -> int:
    """Run a Python program in several processes on this machine, wait for them, and return torchrun's exit code.

    Args:
        processes: number of processes.
        program: path of the program and its arguments.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    started = subprocess.Popen([*command, *program])
    # Otherwise torchrun's processes would outlive this one
    earlier = signal.signal(signal.SIGTERM, lambda *_: started.terminate())
    try:
        return started.wait()
    finally:
        signal.signal(signal.SIGTERM, earlier)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder, so that no other command writes to it at the same time.

    The lock ends with this process, also if it is killed. Processes that this one starts work under the same lock. Of
    the processes that torchrun or SLURM start, the first one holds it.

    Raises:
        InputError: if another command has locked the folder; the message names its process and machine.
    """
    if getattr(rank_zero_only, "rank", 0) or os.environ.get(LOCKED) == str(folder):
        yield
        return
    lock, holder = FileLock(folder / ".lock", blocking=False), folder / ".locked_by"
    try:
        lock.acquire()
    except Timeout:
        who = holder.read_text() if holder.exists() else "another process"
        raise InputError(
            f"{folder} is in use by {who}: wait until that command ends, or give this run a name of its own (name=...)"
        ) from None
    try:
        write_atomically(holder, f"process {os.getpid()} on {socket.gethostname()}")
        os.environ[LOCKED] = str(folder)
        yield
    finally:
        os.environ.pop(LOCKED, None)
        holder.unlink(missing_ok=True)
        lock.release()
