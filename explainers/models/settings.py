"""Settings that override those of a model: normalisation, size of the images, names of the classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from explainers.errors import InputError
from explainers.models.model import TargetModel

Statistics = float | Sequence[float] | None
"""Mean or standard deviation of pixels from 0 to 1: one for all channels, or one for each; None for the model's own."""


@dataclass(frozen=True)
class Inputs:
    """The images that a model of another library takes, and the names of its classes.

    Args:
        image_size: height and width of the images in pixels; None if not known.
        mean: mean of normalised pixels from 0 to 1; None if not known.
        std: their standard deviation; None if not known.
        origin: where mean and standard deviation come from, for messages.
        classes: names of the classes, in the order of the logits; empty if they are not known.
    """

    image_size: int | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    origin: str
    classes: Sequence[str] = ()

    def override(self, mean: Statistics, std: Statistics, classes: Sequence[str]) -> "Inputs":
        """Override mean, standard deviation and names by those that the user gives; see `as_target`."""
        given = [name for name, value in (("mean", mean), ("std", std)) if value is not None]
        origin = {0: self.origin, 1: f"{' '.join(given)} as given, else {self.origin}", 2: "as given"}[len(given)]
        return replace(
            self,
            mean=self.mean if mean is None else channels("mean", mean, 3),
            std=self.std if std is None else channels("std", std, 3),
            origin=origin,
            classes=classes or self.classes,
        )

    def __str__(self) -> str:
        if self.mean is None or self.std is None:
            return "mean and std not known"
        mean, std = (" ".join(f"{value:.3g}" for value in values) for values in (self.mean, self.std))
        return f"mean {mean}, std {std} ({self.origin})"


def override_settings(
    target: TargetModel, mean: Statistics, std: Statistics, image_size: int | None, classes: Sequence[str]
) -> TargetModel:
    """Give a target, which is changed in place, other settings than its own; see `as_target`.

    Raises:
        InputError: for a normalisation that does not fit three channels, a size that the model cannot take, or another
            number of class names than of classes.
    """
    config = dict(target.backbone.pretrained_cfg)  # a copy; timm reads the settings of a model from it
    for name, given in (("mean", mean), ("std", std)):
        if given is not None:
            values = channels(name, given, len(getattr(target, name)))
            config[name] = tuple(values)
            getattr(target, name).copy_(torch.tensor(values)[:, None, None])
    target.backbone.pretrained_cfg = config
    if image_size is not None:
        _resize(target, image_size)
    if classes:
        target.classes = class_names(classes, target.num_classes)
    return target


def channels(name: str, given: Any, count: int) -> list[float]:
    """Return one number for each of `count` channels.

    >>> channels("std", 0.5, 3)
    [0.5, 0.5, 0.5]
    """
    values = [given] * count if isinstance(given, int | float) else list(given)
    fits = len(values) == count and all(isinstance(value, int | float) for value in values)
    if not fits or not all(value > 0 if name == "std" else 0 <= value <= 1 for value in values):
        allowed = "above 0" if name == "std" else "from 0 to 1"
        raise InputError(
            f"expected {name} of pixels from 0 to 1, {count} numbers {allowed}, got {given}: give, for example,"
            f" {name}=0.5, and divide those of pixels to 255 by 255"
        )
    return [float(value) for value in values]


def check_image_size(image_size: Any) -> None:
    """Raise an InputError unless the side of an image is a number of pixels."""
    if isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1:
        raise InputError(f"expected image_size as a number of pixels, such as 224, got {image_size!r}")


def class_names(classes: Sequence[str], count: int) -> list[str]:
    """Return the names of the classes, and raise an InputError unless there is one for each of `count` classes."""
    if isinstance(classes, str) or len(classes) != count:
        given = repr(classes) if isinstance(classes, str) else f"{len(classes)}"
        raise InputError(
            f"expected a list of names of the model's {count} classes, got {given}: give one for each logit, in order"
        )
    return [str(name) for name in classes]


def _resize(target: TargetModel, image_size: int) -> None:
    """Change the size of the images that a target takes; a transformer interpolates its positions."""
    backbone = target.backbone
    try:
        if hasattr(backbone, "set_input_size"):
            backbone.set_input_size(img_size=(image_size, image_size))
        backbone.pretrained_cfg["input_size"] = (len(target.mean), image_size, image_size)
        target.check_grid(target.grid)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"expected image_size that {target.name} can take, got {image_size}: {reason}") from error
