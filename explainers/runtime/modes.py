"""Modes of PyTorch: what a call leaves as it was for its caller, and float64 where a device has it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the random state of PyTorch, its GPUs, NumPy and Python on exit; new layers and imports draw from it.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> with keep_random_state():
    ...     drawn = torch.rand(3)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors without a graph that autograd accepts later, also inside `torch.inference_mode`.

    Without a device they are on the CPU, whatever `torch.set_default_device` says.
    """
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with torch.inference_mode(False), torch.no_grad(), device:  # the first alone would enable gradients
        yield


WITHOUT_FLOAT64 = {"mps"}
"""Types of devices without float64: Apple's GPUs."""


def finest_dtype(device: torch.device) -> torch.dtype:
    """The floating-point type for sums on a device: float64, or float32 where it has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_float64(values: Tensor) -> Tensor:
    """Convert to float64, on the CPU if the device has none."""
    return values.cpu().double() if values.device.type in WITHOUT_FLOAT64 else values.double()
