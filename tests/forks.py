"""Commands and torchrun without the seconds that a new process takes to import: as forks; see `fork_server`."""

import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from commands import PYTHONPATH, ROOT
from fork_server import PATIENCE, fork, join
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import run as torchrun

from explainers.running import processes, record


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
    run_as_main(program, *overrides, f"hydra.run.dir={folder}")


def run_as_main(program, *arguments):
    """`python <program> *arguments`."""
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


def run_in_session(work, log, prepare):
    os.setsid()  # so that all processes that the command starts can be killed
    be_new()
    os.environ["PYTHONPATH"] = PYTHONPATH
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    prepare()
    work()


class Started:
    """A process that can be killed with all that it has started.

    Args:
        work: what it does.
        log: the file of what all these processes print.
        prepare: called before, for example to patch something.
    """

    def __init__(self, work: Callable[[], None], log: Path, prepare: Callable[[], None] = ask_no_gpu) -> None:
        self.log = Path(log)
        self.process = fork(run_in_session, work, self.log, prepare)

    def end(self, timeout: float = PATIENCE) -> tuple[int, str]:
        """Wait until it ends; one that hangs is killed. Its exit code, negative for a signal, and what was printed."""
        join(self.process, timeout)
        self.kill()
        return self.process.exitcode, self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill all processes that are left, and wait until they are gone: what they write would count for the next."""
        self.process.kill()
        self.process.join()
        deadline = time.monotonic() + PATIENCE
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


@contextmanager
def forked(program, *overrides, folder, prepare=ask_no_gpu):
    """The process of a command, which nothing outlives; `<folder>.log` has what the processes it starts print.

    Args:
        program: `train.py` or `eval.py`.
        overrides: its arguments.
        folder: folder of the run.
        prepare: called in the process before the program, for example to patch it.
    """
    started = Started(partial(run_program, program, overrides, folder), f"{folder}.log", prepare)
    try:
        yield started.process
    finally:
        started.kill()


def wait_for(happened: Callable[[], bool], what: str) -> None:
    """Wait until something has happened; fail with `what` if it has not in time."""
    deadline = time.monotonic() + PATIENCE
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
            join(process)
        return max(abs(process.exitcode) for process in self.processes)


class Torchrun:
    """Stands in for the Popen of torchrun: a fork that runs torchrun, whose processes are forks, too."""

    def __init__(self, command, **_):
        assert command[:3] == [sys.executable, "-c", processes.TORCHRUN]
        self.process = fork(act_as_torchrun, *command[3:])
        self.terminate = self.process.terminate

    def wait(self):
        self.process.join()
        return self.process.exitcode


def act_as_torchrun(*arguments):
    """`torchrun *arguments`, in a fork; the processes that it starts are forks, too."""
    GlobalHydra.instance().clear()  # of the process that this one is a fork of
    torchrun.run_script_path = act_as_rank
    sys.argv = ["-c", "--run-path", "--start-method=fork", *arguments]
    exec(processes.TORCHRUN, {})


def act_as_rank(program, *arguments):
    """One of the processes that torchrun starts."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a new process
    rank_zero_only.rank = int(os.environ["RANK"])  # Lightning asks the environment when it is imported
    run_as_main(program, *arguments)
