"""Runs a command in a fork of this process, kills it with all that it has started, and tells how it ended."""

import ctypes
import fcntl
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from forks import FORK, ask_no_gpu, join

Work = Callable[[Path], None]
"""Runs a command in this process, in a folder: its place."""

PIPE_SIZE = 2**20

MESSAGE = re.compile(r"(error|\w*Error|CorruptImage): ")
"""The beginning of the line that ends `train.py` and `eval.py`, or `write_beton`, which names the kind of its error."""


@dataclass
class Ending:
    """How a command ended: its exit code, negative for a signal, and what its processes printed."""

    code: int
    output: str

    @property
    def line(self) -> str | None:
        """The message of a command that ended with one line and no traceback; None for every other ending."""
        lines = [line for line in self.output.splitlines() if MESSAGE.match(line)]
        last = self.output.strip().rpartition("\n")[2]
        return last if self.code > 0 and lines == [last] and "Traceback" not in self.output else None


class Started:
    """A command in a fork of this process.

    Args:
        work: runs the command, given its place.
        place: the folder that it reads and writes.
        prepare: called in the fork before the command.
    """

    def __init__(self, work: Work, place: Path, prepare: Callable[[], None] = lambda: None) -> None:
        self.reader, writer = os.pipe()  # a file would be subject to a limit of file sizes
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self.start = time.monotonic()
        self.process = FORK.Process(target=self._work, args=(work, place, writer, prepare))
        self.process.start()
        os.close(writer)

    @staticmethod
    def _work(work: Work, place: Path, writer: int, prepare: Callable[[], None]) -> None:
        os.setsid()  # so that all processes that the command starts can be killed
        os.dup2(writer, 1), os.dup2(writer, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        for name in [name for name in os.environ if name.startswith(("SLURM_", "WANDB_", "HYDRA_"))]:
            del os.environ[name]
        os.environ["XDG_CACHE_HOME"] = f"{place}/home"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        gc.freeze()  # or the collector would look at, and so copy, all that was imported
        ask_no_gpu()
        prepare()
        work(place)

    def kill(self, after: float) -> bool:
        """SIGKILL all processes of the command `after` seconds from its start; False if it has ended before."""
        self.process.join(max(0.0, self.start + after - time.monotonic()))
        self._end()
        os.close(self.reader)
        return self.process.exitcode == -signal.SIGKILL

    def ending(self, timeout: float = 180) -> Ending:
        """Wait until the command ends; one that hangs is killed."""
        join(self.process, timeout)
        self._end()
        os.set_blocking(self.reader, False)
        output = b""
        with suppress(BlockingIOError):
            output = os.read(self.reader, PIPE_SIZE)
        os.close(self.reader)
        assert self.process.exitcode is not None
        return Ending(self.process.exitcode, output.decode(errors="replace"))

    def _end(self) -> None:
        """Kill all processes that are left, and wait until they are gone: what they write would count for the next."""
        self.process.kill()
        self.process.join()
        deadline = time.monotonic() + 10
        while (left := self.left()) and time.monotonic() < deadline:
            for process, command in left.items():
                if "resource_tracker" not in command:  # Python's own: it removes shared memory, and ends
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            time.sleep(0.005)

    def left(self) -> dict[int, str]:
        """Number → command line of each living process of the command's session."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                if session == str(self.process.pid) and state not in "ZX":
                    found[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
        return found


def give_up_rights() -> None:
    """Make root obey permissions of files, as every other user does: drop all capabilities of this process.

    Becoming another user would be simpler, but that user may not be allowed to read Python's own modules.
    """
    version_3, this_process = 0x20080522, 0
    header, none = (ctypes.c_uint32 * 2)(version_3, this_process), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def wait_for(happened: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something has happened; fail with `what` if it has not in time."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
