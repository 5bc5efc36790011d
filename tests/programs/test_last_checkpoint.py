"""When last.ckpt is written, from which an interrupted run resumes, and what signals do."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from fork_server import fork, join
from lightning import Callback
from omegaconf import OmegaConf
from test_callbacks import QUIET, Slow, samples
from torch.utils.data import DataLoader

from callbacks.last_checkpoint import LastCheckpoint
from explainers.running.trainer import build_trainer

EPOCHS, STEPS = 2, 4


class Steps(Callback):
    """Does something before one step, and records the step of the checkpoint before every step."""

    def __init__(self, path, step=None, action=lambda: None):
        self.path = path
        self.step = step
        self.action = action
        self.saved = []

    def on_train_batch_start(self, trainer, *_):
        saved = torch.load(self.path, weights_only=True)["global_step"] if self.path.exists() else None
        self.saved.append(saved)
        if trainer.global_step == self.step:
            self.action()


class Validation(Callback):
    """Does something in each validation, and records its results."""

    def __init__(self, *actions):
        self.actions, self.done = actions, []

    def on_validation_batch_end(self, trainer, *_):
        for action in () if trainer.sanity_checking else self.actions:
            self.done.append(action())


def fit(folder, minutes=10, step=None, action=lambda: None, validation=None, **options):
    steps = Steps(folder / "last.ckpt", step, action)
    callbacks = [LastCheckpoint(str(folder), minutes), steps, validation or Validation()]
    settings = {"_target_": "lightning.Trainer", "max_epochs": EPOCHS} | QUIET | {"enable_checkpointing": True}
    trainer = build_trainer(OmegaConf.create(settings | options), callbacks=callbacks)
    try:
        validated = DataLoader(samples(4), batch_size=4) if validation else None
        trainer.fit(Slow(), DataLoader(samples(4 * STEPS), batch_size=4), validated)
    finally:
        steps.saved.append(torch.load(steps.path, weights_only=True)["global_step"])
    return steps.saved


@pytest.fixture
def handler():
    """What SIGUSR2 does before the training, as submitit's handler; and the calls of it."""
    calls = []
    earlier = signal.signal(signal.SIGUSR2, lambda number, _: calls.append(number))
    yield calls
    signal.signal(signal.SIGUSR2, earlier)


def test_a_checkpoint_is_written_at_the_end_of_each_epoch(tmp_path):
    assert fit(tmp_path) == [None] * STEPS + [4] * STEPS + [8]


def test_it_is_written_between_two_steps_when_it_is_due_except_before_a_validation(tmp_path, monkeypatch):
    """One of three minutes passes with each look at the clock: at the start, and after each step or checkpoint."""
    clock = iter(range(0, 100_000, 60))
    monkeypatch.setattr("callbacks.last_checkpoint.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert fit(tmp_path, minutes=3) == [None, None, None, 3, 4, 4, 4, 7, 8]


def test_it_waits_for_the_end_of_a_step_of_several_batches(tmp_path):
    assert fit(tmp_path, minutes=0, accumulate_grad_batches=2) == [None, None, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_step(number, tmp_path, capsys):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ending:
        fit(tmp_path, step=5, action=lambda: os.kill(os.getpid(), number))
    assert ending.value.code == 128 + number and signal.getsignal(number) == before
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6
    assert capsys.readouterr().out == f"{number.name}: saved step 6, from which the same command resumes\n"


def interrupt_twice():
    os.kill(os.getpid(), signal.SIGINT), os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, capfd):
    process = fork(fit, tmp_path, step=1, action=interrupt_twice)
    join(process)
    assert process.exitcode == 128 + signal.SIGINT and not (tmp_path / "last.ckpt").exists()
    assert capfd.readouterr().err.count("SIGINT: saving after this step; Ctrl-C again ends at once") == 1


def test_a_signal_in_the_last_step_of_an_epoch_ends_the_run_after_the_epoch(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path, step=3, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 1


def test_what_a_signal_did_before_the_training_happens_once_the_step_is_saved(handler, tmp_path):
    """The run continues if the handler does not end it."""
    saved = fit(tmp_path, step=1, action=lambda: os.kill(os.getpid(), signal.SIGUSR2))
    assert handler == [signal.SIGUSR2]
    assert saved == [None, None, 2, 2, *[4] * STEPS, 8]


def test_in_a_validation_the_handler_is_called_at_once(handler, tmp_path):
    validation = Validation(lambda: os.kill(os.getpid(), signal.SIGUSR2), lambda: len(handler))
    fit(tmp_path, validation=validation)
    assert validation.done == [None, 1, None, 2]


def test_without_a_handler_the_validation_is_finished_and_the_epoch_saved(tmp_path):
    validation = Validation(lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: "continues")
    with pytest.raises(SystemExit):
        fit(tmp_path, validation=validation)
    assert validation.done == [None, "continues"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == STEPS
