"""Learning rates, step by step: those of torch's own schedules, and after a resumption those of the new length."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from explainers.training import warmup_cosine, warmup_linear

SCHEDULES = {"cosine": warmup_cosine, "linear": warmup_linear}
FALLING = {"cosine": CosineAnnealingLR, "linear": lambda *given: LinearLR(given[0], 1.0, 0.0, given[1])}


def optimiser(rate=0.003):
    return SGD([nn.Parameter(torch.zeros(1))], lr=rate)


def rates(optimizer, schedule, steps):
    """The learning rate of every step."""
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


def whole(build, steps, rate=0.003):
    optimizer = optimiser(rate)
    return rates(optimizer, build(optimizer, steps), steps)


def continued(saved, build, steps, rate=0.003):
    """The rates after the restoration of what `saved` holds, in the order in which Lightning restores it."""
    optimizer = optimiser(rate)
    schedule = build(optimizer, steps)
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    return rates(optimizer, schedule, steps - saved[1]["last_epoch"])


def stopped(build, steps, after):
    optimizer = optimiser()
    schedule = build(optimizer, steps)
    rates(optimizer, schedule, after)
    return optimizer.state_dict(), schedule.state_dict()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_are_those_of_torchs_schedules_in_sequence(name):
    optimizer = optimiser()
    parts = [LinearLR(optimizer, 1 / 7, total_iters=7), FALLING[name](optimizer, 93)]
    expected = rates(optimizer, SequentialLR(optimizer, parts, [7]), 100)
    assert whole(partial(SCHEDULES[name], warmup=0.07), 100) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("name", "after"), [("cosine", 3), ("linear", 10), ("cosine", 40)])
def test_a_resumed_schedule_has_the_rates_of_an_uninterrupted_one(name, after):
    """In the warm-up, at its end, and later."""
    build = partial(SCHEDULES[name], warmup=1 / 6)
    with warnings.catch_warnings(action="error"):
        assert continued(stopped(build, 60, after), build, 60) == whole(build, 60)[after:]


@pytest.mark.parametrize(("name", "steps"), [("cosine", 30), ("linear", 200)])
def test_a_longer_run_goes_on_with_the_rates_of_its_own_length(name, steps):
    """From its first step on; the rate never rises again."""
    saved = stopped(partial(SCHEDULES[name], warmup=0.05), 20, 20)
    went_on = continued(saved, partial(SCHEDULES[name], warmup=0.05), steps)
    assert went_on == whole(partial(SCHEDULES[name], warmup=0.05), steps)[20:]
    assert went_on == sorted(went_on, reverse=True) and went_on[0] > 0
