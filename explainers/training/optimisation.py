"""How modules optimise: what `configure_optimizers` returns, and schedules with a linear warm-up, counted in steps."""

from collections.abc import Callable, Iterable

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from explainers.errors import InputError

OptimizerBuilder = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerBuilder = Callable[[Optimizer, int], LRScheduler]


def configure(
    parameters: Iterable[nn.Parameter],
    optimizer: OptimizerBuilder | None,
    scheduler: SchedulerBuilder | None,
    total_steps: float,
) -> OptimizerLRScheduler:
    """Lightning's description of the optimiser of `parameters` and its schedule, stepped after every step."""
    if optimizer is None:
        raise InputError("training needs an optimizer, and none was given")
    built = optimizer(parameters)
    if scheduler is None:
        return built
    return {"optimizer": built, "lr_scheduler": {"scheduler": scheduler(built, int(total_steps)), "interval": "step"}}


def warmup_cosine(optimizer: Optimizer, total_steps: int, warmup: float = 0.05) -> LRScheduler:
    """Linear warm-up, then a cosine to 0 (TVE, Table 4). `warmup`: a fraction of the steps or, from 1, their number."""
    rising, falling = _split(total_steps, warmup)
    return _after_warmup(optimizer, rising, CosineAnnealingLR(optimizer, falling))


def warmup_linear(optimizer: Optimizer, total_steps: int, warmup: float = 0.05) -> LRScheduler:
    """Linear warm-up, then a straight line to 0 (TVE, Table 2). `warmup`: see `warmup_cosine`."""
    rising, falling = _split(total_steps, warmup)
    return _after_warmup(optimizer, rising, LinearLR(optimizer, 1.0, 0.0, falling))


def _split(total_steps: int, warmup: float) -> tuple[int, int]:
    rising = max(1, round(warmup if warmup >= 1 else warmup * total_steps))
    return rising, max(1, total_steps - rising)


def _after_warmup(optimizer: Optimizer, rising: int, falling: LRScheduler) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, 1 / rising, total_iters=rising), falling], milestones=[rising])
