"""The time of each part of a training step."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from explainers.errors import InputError, check_range

PARTS = ("loader", "target", "network", "backward", "communication", "optimiser", "other")
ACTIONS = {
    "train_dataloader_next": "loader",
    "batch_to_device": "loader",
    "training_step": "network",
    "backward": "backward",
    "optimizer_step": "optimiser",  # Lightning calls training_step and backward inside of it
}
"""Action of Lightning's trainer → part."""
PAUSES = ("on_validation_start", "on_train_epoch_end")


class Stopwatch(Profiler):
    """Adds up the seconds of nested parts from the first batch on; time counts for the innermost part alone.

    The profilers of Lightning and torch count nested actions in each of the outer ones, too, and know no frozen target.

    Args:
        wait: returns when all work of the device is done; called before the clock is read.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.wait = wait
        self.parts = ["other"]
        self.since: float | None = None
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def start(self, action_name: str) -> None:
        action = action_name.rpartition(".")[2]
        if action == "train_dataloader_next" and self.since is None:
            self.since = time.perf_counter()
        if action in PAUSES:
            self.pause()
        if action in ACTIONS:
            self.enter(ACTIONS[action])

    def stop(self, action_name: str) -> None:
        if action_name.rpartition(".")[2] in ACTIONS:
            self.leave()

    def enter(self, part: str) -> None:
        """Begin a part inside the innermost one, except inside a compiled function, which is timed as a whole."""
        if not torch.compiler.is_compiling():
            if part != self.parts[-1]:
                self.count(self.wait)
            self.parts.append(part)

    def leave(self) -> None:
        """End the innermost part."""
        if not torch.compiler.is_compiling():
            if self.parts[-1] != self.parts[-2]:
                self.count(self.wait)
            self.parts.pop()

    def pause(self) -> None:
        """Stop the clock until the next batch is fetched."""
        self.count(self.wait)
        self.since = None

    def count(self, wait: Callable[[], None]) -> None:
        """Add the time until `wait` returns to the innermost part."""
        if self.since is not None:
            wait()
            now = time.perf_counter()
            self.seconds[self.parts[-1]] += now - self.since
            self.since = now


class Profile(Callback):
    """Prints the milliseconds of each part of a training step, and images per second, after the training.

    - loader: waiting for the next batch, and copying it to the device
    - target: frozen submodules, and the sources of the loss, with their masks and backward passes
    - network: the rest of the training step: forward pass of what is trained, random crops, loss
    - backward: the backward pass, and what DDP sends beside it
    - communication: what DDP adds to it: from this process's last gradient until the mean over all processes
    - optimiser: gradient clipping, the step, zeroing gradients
    - other: logging, callbacks, schedule

    The parts sum to the duration of a step, without validation and ends of epochs. A GPU is synchronised where a part
    begins or ends, which slows down steps. Seconds are measured in the first process, images in all.

    Args:
        warmup: number of steps at the start of the training that are not counted.

    Raises:
        InputError: if `warmup` is negative, or after a training without more steps.
    """

    def __init__(self, warmup: int = 5) -> None:
        check_range(0, warmup=warmup)
        self.warmup = warmup
        self.changes = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps = 0
        self.images = 0
        self.watch = Stopwatch(getattr(torch, pl_module.device.type).synchronize)
        replace(trainer, "profiler", self.watch, self.changes)
        if "sources" in vars(pl_module):
            timed = [Timed(source, self.watch) for source in vars(pl_module)["sources"]]
            replace(pl_module, "sources", timed, self.changes)
        for part in getattr(pl_module, "frozen", ()):
            time_calls(pl_module.get_submodule(part), self.watch, self.changes)
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            time_averaging(trainer.strategy.model, self.watch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.steps += 1
        if self.steps == self.warmup:
            self.watch.pause()
            self.watch.seconds = dict.fromkeys(PARTS, 0.0)
        if self.steps > self.warmup:
            self.images += len(batch["index"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.changes.close()
        if self.steps <= self.warmup:
            raise InputError(
                f"expected more than {self.warmup} steps (warmup), got {self.steps}: increase trainer.max_steps"
            )
        if trainer.is_global_zero:
            print(table(self.watch.seconds, self.steps - self.warmup, self.images * trainer.world_size))

    def on_exception(self, *_: Any) -> None:
        self.changes.close()


def table(seconds: Mapping[str, float], steps: int, images: int) -> str:
    """The table of each part's time, from the seconds of all steps and their number of images.

    >>> print(table({"network": 0.3, "backward": 0.7}, steps=2, images=64))
    part             ms/step       %
    network            150.0    30.0
    backward           350.0    70.0
    total              500.0   100.0
    2 steps, 64.0 images/s
    """
    total = sum(seconds.values())
    lines = [f"{'part':14}{'ms/step':>10}{'%':>8}"]
    for part, value in {**seconds, "total": total}.items():
        lines.append(f"{part:14}{1e3 * value / steps:10.1f}{100 * value / total:8.1f}")
    return "\n".join([*lines, f"{steps} steps, {images / total:.1f} images/s"])


class Timed:
    """A source or a function whose calls count as `target`."""

    def __init__(self, call: Any, watch: Stopwatch) -> None:
        self.call = call
        self.watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.watch.enter("target")
        try:
            return self.call(*args, **kwargs)
        finally:
            self.watch.leave()


def time_calls(model: nn.Module, watch: Stopwatch, changes: ExitStack) -> None:
    """Count calls of a model, of its submodules and of its compiled functions as `target`; `changes` undoes it."""
    for module in model.modules():
        changes.callback(module.register_forward_pre_hook(lambda *_: watch.enter("target")).remove)
        changes.callback(module.register_forward_hook(lambda *_: watch.leave(), always_call=True).remove)
        for name, value in list(vars(module).items()):
            if hasattr(value, "_torchdynamo_orig_callable"):  # by module.compile() or module.f = torch.compile(...)
                replace(module, name, Timed(value, watch), changes)


def replace(owner: object, name: str, value: Any, changes: ExitStack) -> None:
    """Set an attribute of an object itself, not of its class; `changes` restores it."""
    changes.callback(vars(owner).__setitem__, name, vars(owner)[name])
    vars(owner)[name] = value


def time_averaging(model: DistributedDataParallel, watch: Stopwatch) -> None:
    """Count what follows the last gradient of a backward pass as `communication`; what DDP sends stays as it is."""

    def average(_: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged = allreduce_hook(model.process_group, bucket)
        if bucket.is_last():  # wait for the stream that computes, not for the one that sends
            watch.count(torch.cuda.current_stream().synchronize if bucket.buffer().is_cuda else watch.wait)
            watch.parts[-1] = "communication"
        return averaged

    model.register_comm_hook(None, average)
