"""Ctrl-C, SIGTERM and SIGHUP end a command alike: a line that says how to resume, and the exit code of shells."""

import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed.run
from fork_server import fork, join
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

from callbacks.last_checkpoint import Pending
from datamodules import write_beton
from explainers.running import processes, signals

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
EACH = pytest.mark.parametrize("number", NUMBERS)


def ending(work, *arguments, ignored=()):
    """The exit code of a fork that does something; it is negative after a signal. nohup ignores one from the start."""
    process = fork(begin, ignored, work, *arguments)
    join(process)
    return process.exitcode


def begin(ignored, work, *arguments):
    """Do something with Python's own handlers, whatever the tests were started by, but for signals to ignore."""
    for number in NUMBERS:
        own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else own)
    work(*arguments)


def command(number, again=False):
    """A command that gets a signal, and maybe SIGINT while it ends."""
    os.environ[signals.LOCKED] = "runs/x"
    signals.answer_signals()
    try:
        os.kill(os.getpid(), number)
    finally:
        if again:
            os.kill(os.getpid(), signal.SIGINT)


@EACH
def test_a_command_says_how_to_resume_and_ends(number, capfd):
    assert ending(command, number) == 128 + number
    told = f"{number.name}: stopped; the same command resumes from what is saved in runs/x\n"
    assert capfd.readouterr().err == told


def test_a_second_ctrl_c_ends_it_at_once():
    assert ending(command, signal.SIGINT, True) == -signal.SIGINT  # of which a shell makes 130


def start_and_signal(number, command, process_group, **_):
    """Stands in for the Popen of torchrun, which gets a signal while it works."""
    assert process_group == 0  # one of its own
    print("started", flush=True)
    return SimpleNamespace(wait=lambda: os.kill(os.getpid(), number), terminate=lambda: os.write(1, b"told"))


def launch(number):
    processes.subprocess.Popen = partial(start_and_signal, number)
    signals.answer_signals()
    processes.torchrun(2, ["train.py"])


@EACH
def test_the_processes_of_a_command_are_ended_first_and_ctrl_c_does_not_reach_them_itself(number, capfd):
    assert ending(launch, number) == 128 + number
    out, err = capfd.readouterr()
    assert out.endswith("started\ntold") and err.startswith(f"{number.name}: stopped; ") and err.count("\n") == 1


def act_as_torchrun(number):
    torch.distributed.run.main = lambda: os.kill(os.getpid(), number)
    for each in NUMBERS:
        signal.signal(each, _terminate_process_handler)  # as torchrun does
    exec(processes.TORCHRUN)


def rank(number, **told):
    os.environ.update(told)
    rank_zero_only.rank = 1
    signals.answer_signals()
    os.kill(os.getpid(), number)


@EACH
def test_torchrun_its_processes_and_all_but_the_first_of_srun_end_without_a_message(number, capfd):
    assert ending(act_as_torchrun, number) == 128 + number
    assert ending(partial(rank, TORCHELASTIC_RUN_ID="x"), number) == -number
    assert ending(rank, number) == 128 + number
    assert not capfd.readouterr().err


def interrupted(number):
    write_beton.write_beton = lambda **_: os.kill(os.getpid(), number)
    write_beton.main(["images", "/dev/null", "--model", "test_vit"])


@EACH
def test_writing_a_beton_ends_alike(number, capfd):
    assert ending(interrupted, number) == 128 + number
    assert capfd.readouterr().err.startswith(f"{number.name}: stopped, nothing was written; ")


def train_a_step(number):
    pending = Pending()
    pending.start()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert pending.number == signal.SIGTERM  # not lost behind the one that is ignored


@pytest.mark.parametrize("work", [command, launch, interrupted, train_a_step], ids=lambda work: work.__name__)
def test_a_program_under_nohup_goes_on_when_its_terminal_closes(work, capfd):
    assert ending(work, signal.SIGHUP, ignored=[signal.SIGHUP]) == 0
    assert "SIGHUP" not in capfd.readouterr().err
