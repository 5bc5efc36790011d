"""Sums and solutions in float64, also for models on devices that lack it."""

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices without float64: Apple's GPUs."""


def finest_dtype(device: torch.device) -> torch.dtype:
    """The floating-point type for sums on a device: float64, or float32 where it has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_float64(values: Tensor) -> Tensor:
    """Convert to float64, on the CPU if the device has none."""
    return values.cpu().double() if values.device.type in WITHOUT_FLOAT64 else values.double()
