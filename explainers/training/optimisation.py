"""Learning rate schedules with a linear warm-up, a share of all steps."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from explainers.errors import check_range

OptimizerBuilder = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerBuilder = Callable[[Optimizer, int], LRScheduler]


def warmup_cosine(optimizer: Optimizer, total_steps: int, warmup: float = 0.05) -> LRScheduler:
    """Build a schedule: linear warm-up, then a half cosine down to 0 (TVE, Table 4).

    Args:
        optimizer: the optimiser whose learning rate is scheduled.
        total_steps: number of steps of the whole training.
        warmup: the share of the steps in which the rate rises, from 0 to 1; at least one step.

    >>> import torch
    >>> optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    >>> schedule = warmup_cosine(optimizer, total_steps=6, warmup=1 / 3)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(round(schedule.get_last_lr()[0], 3))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.5, 0.75, 1.0, 0.854, 0.5, 0.146]
    """
    return WarmUp(optimizer, total_steps, warmup, CosineAnnealingLR)


def warmup_linear(optimizer: Optimizer, total_steps: int, warmup: float = 0.05) -> LRScheduler:
    """Build a schedule: linear warm-up, then a linear decrease to 0 (TVE, Table 2); see `warmup_cosine`."""
    return WarmUp(optimizer, total_steps, warmup, lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.0, steps))


class WarmUp(SequentialLR):
    """A linear warm-up, followed by another schedule, of at least one step each.

    A resumed run keeps the length and learning rate of its own config, and restores only the step. Torch's schedules
    would restore the length of the interrupted run, and a cosine would rise again after its end.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup: float, then: SchedulerBuilder) -> None:
        check_range(0, 1, warmup=warmup)
        rising = max(1, round(warmup * total_steps))
        falling = then(optimizer, max(1, total_steps - rising))
        super().__init__(optimizer, [LinearLR(optimizer, 1 / rising, total_iters=rising), falling], [rising])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Advance to the step of `state_dict`, and set the learning rate of the optimiser for the next step.

        The steps are taken one by one, because torch computes each rate from the one before, and rounds it.
        """
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate
        with warnings.catch_warnings():
            # The optimiser has stepped in another process
            warnings.filterwarnings("ignore", ".*before `optimizer.step")
            for _ in range(state_dict["last_epoch"] - self.last_epoch):
                self.step()
