"""Commands and torchrun without the seconds that a new process takes to import: forks of this process."""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
from contextlib import contextmanager, suppress

from commands import MARK, PYTHONPATH, ROOT, running
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import run as torchrun

from explainers.running import processes, record

FORK = multiprocessing.get_context("fork")


def join(process, seconds):
    """Wait until a fork ends. One that hangs prints where, by pytest's faulthandler, and dies by SIGABRT."""
    process.join(seconds)
    if process.is_alive():
        os.kill(process.pid, signal.SIGABRT)
        process.join()


def ask_no_gpu():
    """Do not ask GPUs for their names: a fork cannot start CUDA if its parent has."""
    record.devices = list


def run_program(program, *overrides, folder):
    """`python train.py *overrides`, in a fork."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "WANDB_"))]:
        del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update({"PYTHONPATH": PYTHONPATH, MARK: str(folder)})
    os.chdir(ROOT)
    with open(f"{folder}.log", "w") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    # pytest has put its own in their places
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    ask_no_gpu()
    sys.argv = [program, *overrides, f"hydra.run.dir={folder}"]
    runpy.run_path(program, run_name="__main__")


@contextmanager
def forked(program, *overrides, folder):
    """The process of a command, which nothing outlives; `<folder>.log` has what the processes it starts print."""
    process = FORK.Process(target=run_program, args=(program, *overrides), kwargs={"folder": folder})
    process.start()
    try:
        yield process
    finally:
        process.kill()
        for started in running(folder):
            with suppress(ProcessLookupError):
                os.kill(started, signal.SIGKILL)
        process.join()


def run_as_rank(work, rank, count, port):
    """Do `work` in a fork, with the environment that torchrun sets."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "forks"}
    os.environ.update({name: str(value) for name, value in environment.items()})
    rank_zero_only.rank = rank  # Lightning asks the environment when it is imported
    ask_no_gpu()
    work()


class Forks:
    """Stands in for the Popen of torchrun; its processes are forks that do `work`."""

    def __init__(self, work, command, **_):
        (count,) = (int(word.partition("=")[2]) for word in command if word.startswith("--nproc_per_node="))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [FORK.Process(target=run_as_rank, args=(work, rank, count, port)) for rank in range(count)]
        for process in self.processes:
            process.start()

    def wait(self):
        for process in self.processes:
            process.join(120)
            process.kill()  # one that hangs
            process.join()
        return max(abs(process.exitcode) for process in self.processes)


class Torchrun:
    """Stands in for the Popen of torchrun: a fork of this process that runs torchrun.

    Args:
        command: what torchrun is started with.
        new: its processes are new ones, as torchrun's are, and not forks.
    """

    def __init__(self, command, new=False, **_):
        assert command[:3] == [sys.executable, "-c", processes.TORCHRUN]
        self.process = FORK.Process(target=act_as_torchrun, args=command[3:], kwargs={"new": new})
        self.process.start()
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
