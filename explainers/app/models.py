"""The model of a session: a copy of its own, of colour images, on a device."""

from pathlib import Path
from typing import Any

import torch

from explainers.errors import InputError
from explainers.models import TargetModel, as_target


def model_of_colour(model: Any, weights: str | Path | None, device: str | torch.device | None) -> TargetModel:
    """Build the model to explain, with the arguments of `Session`; the caller's stays as it is.

    Returns:
        The model, in eval mode, whose weights need no gradients.

    Raises:
        InputError: for a model of grey images, and a device that this machine does not have.
    """
    target = as_target(model, weights)
    target = target.copied() if target is model else target
    if device is None and isinstance(model, str) and torch.cuda.is_available():
        device = "cuda"
    _check_colour(target)
    return _moved(target, device).eval().requires_grad_(False)


def _check_colour(target: TargetModel) -> None:
    """Raise an InputError for a model whose first convolution reads other channels than red, green and blue."""
    convolutions = (layer for layer in target.backbone.modules() if isinstance(layer, torch.nn.Conv2d))
    channels = next((layer.in_channels for layer in convolutions), 3)
    if channels % 3:  # some models divide images into blocks of pixels first
        raise InputError(f"expected a model of images of 3 channels, got {target.name} of {channels}")


def _moved(target: TargetModel, device: str | torch.device | None) -> TargetModel:
    """Move a model to a device; `None` leaves it where it is."""
    if device is None:
        return target
    try:
        return target.to(device)
    except (RuntimeError, AssertionError) as error:  # an unknown device, or none of its kind
        reason = str(error).partition("\n")[0][:80]
        raise InputError(f"expected a device such as cpu or cuda, got {device}: {reason}") from error
