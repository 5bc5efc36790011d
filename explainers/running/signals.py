"""What the processes of a command do on a signal, and the exit code that they end with.

- A command, and each process that srun starts (`answer_signals`): on SIGINT (Ctrl-C), SIGTERM or SIGHUP (a
  closed terminal), it says how to resume and exits with 128 + the number of the signal. A second Ctrl-C ends it at
  once.
- A command that has started torchrun (`forward_signals`): it first ends its processes, so that they can save.
- A process of torchrun: it ends without a message, also when torchrun is killed (`end_with_parent`).
- A SLURM job: on SIGUSR1, it is requeued.
- Any of these while it trains: the above happens once `LastCheckpoint` has saved the step.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from explainers.saved.files import is_first_process

LIBRARY = ctypes.CDLL(None)  # loaded here, because a fork may not

LOCKED = "EXPLAINERS_LOCKED_FOLDER"
"""Environment variable with the folder that this process or one of its parents has locked."""


class Handler:
    """Calls a function with the number of a signal, in this process alone: loader processes inherit handlers."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.act = act
        self.process = os.getpid()

    def __call__(self, number: int, frame: Any) -> None:
        if os.getpid() == self.process:
            self.act(number)


def answer_signals() -> None:
    """Install the handlers of a process that `train.py` or `eval.py` runs in; the docstring of this file lists them."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Ctrl-C reaches a torchrun of the user
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # submitit and nohup have set their own
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                signal.signal(number, Handler(end_run))
    if "SLURM_JOB_ID" in os.environ and LOCKED not in os.environ:  # otherwise the parent process requeues
        signal.signal(signal.SIGUSR1, Handler(requeue))


def end_run(number: int) -> None:
    """End a command, and say how to resume; the next Ctrl-C ends it at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if is_first_process():
        saved = os.environ.get(LOCKED, "its folder")
        write_line(f"{signal.Signals(number).name}: stopped; the same command resumes from what is saved in {saved}")
    sys.exit(128 + number)


def requeue(number: int) -> None:
    """Ask SLURM to requeue the job of this process, and end; SLURM warns a job by `#SBATCH --signal=USR1@120`."""
    if is_first_process():
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
        try:
            subprocess.run(["scontrol", "requeue", job], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"cannot requeue job {job}: {error}; submit it again to resume the run")
    sys.exit(128 + number)


def write_line(line: str) -> None:
    """Write a line to stderr; unlike `print`, it may be called while a signal interrupts another `print`."""
    os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def end_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when its parent ends.

    A launcher that is killed cannot end its processes, which would continue to train.
    """
    if sys.platform == "linux":
        LIBRARY.prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


@contextmanager
def forward_signals(launcher: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Inside, a signal terminates torchrun, for whose end the body waits; then this process handles the signal."""
    received: list[int] = []

    def end(number: int, _: Any) -> None:
        if number == signal.SIGINT and number in received:
            os._exit(128 + number)  # a second Ctrl-C; Linux ends the processes
        received.append(number)
        launcher.terminate()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
    earlier: dict[int, Any] = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    for number in received:
        if callable(earlier[number]):
            earlier[number](number, None)
