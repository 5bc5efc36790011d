"""The processes of one command, and the lock that keeps two commands from writing to one folder."""

import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning import Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from explainers.errors import InputError
from explainers.saved.files import write_atomically

TORCHRUN = """
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main
try:
    main()
except SignalException as ended:
    sys.exit(128 + ended.sigval)
"""
"""torchrun, without a traceback where it has ended its processes because it was told to."""

LIBRARY = ctypes.CDLL(None)  # loaded here, because a fork may not

LOCKED = "EXPLAINERS_LOCKED_FOLDER"
"""Environment variable with the folder that this process or one of its parents has locked."""


def torchrun(processes: int, program: Sequence[str]) -> int:
    """Run a Python program in several processes on this machine, wait for them, and return torchrun's exit code.

    A signal that ends this process ends them first, so that they can save what they have.

    Args:
        processes: number of processes.
        program: path of the program and its arguments.
    """
    command = [sys.executable, "-c", TORCHRUN, "--standalone", f"--nproc_per_node={processes}"]
    # Ctrl-C is for this process alone, which tells the others in order
    started = subprocess.Popen([*command, *program], preexec_fn=end_with_parent, process_group=0)
    received: list[int] = []

    def end(number: int, _: Any) -> None:
        if number == signal.SIGINT and number in received:
            os._exit(128 + number)  # a second Ctrl-C; Linux ends the processes
        received.append(number)
        started.terminate()

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
    earlier: dict[int, Any] = {number: signal.signal(number, end) for number in numbers}
    try:
        code = started.wait()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    for number in received:
        if callable(earlier[number]):
            earlier[number](number, None)
    return code


def end_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when its parent ends, however that ends.

    A killed launcher cannot end its processes, which would train on without it.
    """
    if sys.platform == "linux":
        LIBRARY.prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


@functools.cache  # the line is printed once
def accelerator_of(wanted: str) -> str:
    """Lightning's accelerator for the one that a trainer's settings name: the CPU in place of Apple's GPUs.

    Metrics are summed and random numbers drawn in float64, which these GPUs (MPS) do not have.

    Raises:
        InputError: if MPS is asked for.
    """
    if wanted == "mps" or wanted == "gpu" and torch.backends.mps.is_available():
        raise InputError(
            f"expected trainer.accelerator=cpu on this machine, got {wanted}: Apple's GPUs (MPS) have no float64, in"
            " which metrics are summed"
        )
    if wanted != "auto" or not torch.backends.mps.is_available():
        return wanted
    rank_zero_only(print)("computing on the CPU, because Apple's GPU (MPS) has no float64, in which metrics are summed")
    return "cpu"


def number_of_processes(trainer: Mapping[str, Any]) -> int:
    """Number of processes that a trainer with these settings needs on this machine.

    >>> number_of_processes({"devices": [0, 2]}), number_of_processes({"accelerator": "cpu", "devices": "auto"})
    (2, 1)
    """
    devices = trainer.get("devices", 1)
    if devices in ("auto", -1, "-1"):
        return max(1, torch.cuda.device_count()) if trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda") else 1
    if isinstance(devices, int | str) and not (str(devices).isdigit() and int(devices) > 0):
        raise InputError(f"expected trainer.devices above 0, a list of them, -1 or auto, got {devices}")
    return int(devices) if isinstance(devices, int | str) else len(devices)


def started_by_launcher(trainer: Mapping[str, Any]) -> bool:
    """Whether torchrun, SLURM or a parent process has started this process, as one of those that a trainer needs.

    Raises:
        InputError: if another number of processes was started than `devices` and `num_nodes` say.
    """
    needed = number_of_processes(trainer), trainer.get("num_nodes", 1)
    told = os.environ
    if "LOCAL_WORLD_SIZE" in told:  # torchrun, maybe in a task of SLURM
        started = int(told["LOCAL_WORLD_SIZE"]), int(told["WORLD_SIZE"]) // int(told["LOCAL_WORLD_SIZE"])
    elif SLURMEnvironment.detect() and told["SLURM_NTASKS"] != "1":  # a single task may start other processes itself
        nodes = int(told.get("SLURM_NNODES", 1))
        started = int(told.get("SLURM_NTASKS_PER_NODE", int(told["SLURM_NTASKS"]) // nodes)), nodes
    elif needed[1] > 1:
        raise InputError(
            f"expected torchrun or srun to start processes on {needed[1]} machines (trainer.num_nodes), got neither:"
            " start this command with one of them, see docs/training.md"
        )
    else:
        return "LOCAL_RANK" in told
    if started != needed:
        raise InputError(
            f"expected {needed[0]} processes on each of {needed[1]} machines, got {started[0]} on each of {started[1]}:"
            f" set trainer.devices={started[0]} trainer.num_nodes={started[1]}, or start more with torchrun or srun"
        )
    return True


def answer_signals() -> None:
    """Prepare this process for Ctrl-C, and for the signals of what has started it.

    Ctrl-C and SIGTERM end a command with a line that says how to go on, and with the exit code that shells expect. The
    processes of torchrun leave that to the one that started it: both signals end them without a word.

    Its end is told by Linux, if it is torchrun. On SIGUSR1, which SLURM sends before the end of a job
    (`#SBATCH --signal=USR1@120`), the job is put into the queue again.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
        if (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):  # a Ctrl-C reaches them from a user's torchrun
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        unset = signal.default_int_handler, signal.SIG_DFL  # and not a handler of submitit or nohup
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in unset:
                signal.signal(number, partial(end_run, os.getpid()))
    if "SLURM_JOB_ID" in os.environ and LOCKED not in os.environ:  # otherwise the process that started this one answers
        signal.signal(signal.SIGUSR1, partial(_requeue, os.getpid()))


def end_run(process: int, number: int, _: Any) -> None:
    """End a command, and say how to go on; the next Ctrl-C ends it at once."""
    if os.getpid() != process:
        return  # a loader process, which has inherited the handler
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    saved = os.environ.get(LOCKED, "its folder")
    if not getattr(rank_zero_only, "rank", 0):  # one of the processes that srun starts
        say(f"{signal.Signals(number).name}: stopped; the same command goes on with what is saved in {saved}")
    sys.exit(128 + number)


def say(line: str) -> None:
    """Write a line to stderr; unlike `print`, it may be called while a signal interrupts another one."""
    os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def _requeue(process: int, number: int, _: Any) -> None:
    """Ask SLURM to start the job of this process again, and end."""
    if os.getpid() != process:
        return  # a loader process, which has inherited the handler
    if getattr(rank_zero_only, "rank", 0) == 0:
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
        try:
            subprocess.run(["scontrol", "requeue", job], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"cannot put job {job} into the queue again: {error}; submit it again, and it goes on")
    sys.exit(128 + number)


def ignore_lightnings_signals(trainer: Trainer) -> None:
    """Keep Lightning from handling signals.

    Its handler of SIGTERM starts a broadcast at any moment of a step, so that processes wait for each other without
    end, and that of SIGUSR1 writes a checkpoint of half a step.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


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
