"""Commands and torchrun without the seconds that a new process takes to import: as forks; see `fork_server`."""

import fcntl
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from commands import MARK, PYTHONPATH, ROOT, running
from fork_server import fork, join
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import run as torchrun

from explainers.running import processes, record

PIPE_SIZE = 2**20


def ask_no_gpu():
    """Do not ask GPUs for their names: a fork cannot start CUDA if its parent has."""
    record.devices = list


def be_new():
    """Be no job of a cluster, and let the processes that this one starts use one thread."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "WANDB_", "HYDRA_"))]:
        del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ask_no_gpu()


def run_program(program, overrides, folder):
    """`python train.py *overrides`, in a fork."""
    os.chdir(ROOT)
    sys.argv = [program, *overrides, f"hydra.run.dir={folder}"]
    runpy.run_path(program, run_name="__main__")


def run_logged(program, overrides, folder, prepare):
    be_new()
    os.environ.update({"PYTHONPATH": PYTHONPATH, MARK: str(folder)})
    with open(f"{folder}.log", "w") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    prepare()
    run_program(program, overrides, folder)


@contextmanager
def forked(program, *overrides, folder, prepare=ask_no_gpu):
    """The process of a command, which nothing outlives; `<folder>.log` has what the processes it starts print.

    Args:
        program: `train.py` or `eval.py`.
        overrides: its arguments.
        folder: folder of the run.
        prepare: called in the process before the program, for example to patch it.
    """
    process = fork(run_logged, program, overrides, folder, prepare)
    try:
        yield process
    finally:
        process.kill()
        for started in running(folder):
            with suppress(ProcessLookupError):
                os.kill(started, signal.SIGKILL)
        process.join()


@dataclass
class Ending:
    """How a command ended: its exit code, negative for a signal, and what its processes printed."""

    code: int
    output: str


class Started:
    """A process that can be killed with all that it has started.

    Args:
        work: what it does, given its place.
        place: the folder that it reads and writes.
        prepare: called before.
    """

    def __init__(self, work: Callable[[Path], None], place: Path, prepare: Callable[[], None] = ask_no_gpu) -> None:
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self.process = fork(run_in_session, work, place, prepare, output=writer)
        os.close(writer)

    def ending(self, timeout: float = 180) -> Ending:
        """Wait until it ends; one that hangs is killed."""
        join(self.process, timeout)
        self.kill()
        os.set_blocking(self.reader, False)
        output = b""
        with suppress(BlockingIOError):
            output = os.read(self.reader, PIPE_SIZE)
        os.close(self.reader)
        return Ending(self.process.exitcode, output.decode(errors="replace"))

    def kill(self) -> None:
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


def run_in_session(work, place, prepare):
    os.setsid()  # so that all processes that the command starts can be killed
    be_new()
    os.environ["XDG_CACHE_HOME"] = f"{place}/home"
    prepare()
    work(place)


def program(name, *overrides):
    """`python <name> *overrides`, as the work of `Started`, with a run in the folder `run` of its place."""
    return partial(run_at, name, overrides)


def run_at(name, overrides, place):
    run_program(name, overrides, f"{place}/run")


def wait_for(happened: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something has happened; fail with `what` if it has not in time."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def run_as_rank(work, rank, count, port):
    """Do `work` in a fork, with the environment that torchrun sets."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "forks"}
    os.environ.update({name: str(value) for name, value in environment.items()})
    rank_zero_only.rank = rank  # Lightning asks the environment when it is imported
    ask_no_gpu()
    work()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Forks:
    """Stands in for the Popen of torchrun; its processes are forks that do `work`."""

    def __init__(self, work, command, **_):
        (count,) = (int(word.partition("=")[2]) for word in command if word.startswith("--nproc_per_node="))
        port = free_port()
        self.processes = [fork(run_as_rank, work, rank, count, port) for rank in range(count)]

    def wait(self):
        for process in self.processes:
            join(process, 120)
        return max(abs(process.exitcode) for process in self.processes)


class Torchrun:
    """Stands in for the Popen of torchrun: a fork of this process that runs torchrun.

    Args:
        command: what torchrun is started with.
        new: its processes are new ones, as torchrun's are, and not forks.
    """

    def __init__(self, command, new=False, **_):
        assert command[:3] == [sys.executable, "-c", processes.TORCHRUN]
        self.process = fork(act_as_torchrun, *command[3:], new=new)
        self.terminate = self.process.terminate

    def wait(self):
        self.process.join()
        return self.process.exitcode


def act_as_torchrun(*arguments, new=False):
    """`torchrun *arguments`, in a fork; the processes that it starts are forks, too, or new ones."""
    GlobalHydra.instance().clear()  # of the process that this one is a fork of
    torchrun.run_script_path = act_as_rank
    sys.argv = ["-c", *([] if new else ["--run-path", "--start-method=fork"]), *arguments]
    exec(processes.TORCHRUN, {})


def act_as_rank(program, *arguments):
    """One of the processes that torchrun starts."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a new process
    rank_zero_only.rank = int(os.environ["RANK"])  # Lightning asks the environment when it is imported
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
