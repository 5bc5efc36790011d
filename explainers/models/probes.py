"""Probe images, and how far the outputs of a model that was taken apart differ from its own."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import timm.data
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.models.wrappers import share_weights

TOLERANCE = 1e-3
"""Largest difference of outputs that counts as rounding, relative to how far outputs of images differ."""
PROBE_SIDES = (1, 2, 4, 16)
"""Sides of the noise in each probe image, before it is enlarged: outputs differ far more than those of fine noise."""


class Unmapped(Exception):  # noqa: N818 - not an error: such a model becomes a plain target
    """A model has no equal in timm; the message says why."""


def count_channels(model: nn.Module) -> int:
    """Count the channels of a model's images: as it says, else those of its first convolution; 3 without one.

    >>> count_channels(nn.Conv2d(6, 8, 3)), count_channels(nn.Linear(2, 2))
    (6, 3)
    """
    first = next((layer.in_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)), 3)
    return getattr(model, "in_chans", None) or first


def draw_probes(channels: int, size: tuple[int, int], like: Tensor) -> Tensor:
    """Draw normalised images (4, C, H, W), whose outputs differ, of the type and on the device of a tensor."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn((1, channels, side, side), generator=generator, dtype=torch.float32) for side in PROBE_SIDES]
    return torch.cat([F.interpolate(each, size=size, mode="bilinear") for each in noise]).to(like)


def compare_outputs(found: Tensor, expected: Tensor) -> float:
    """Compute the largest difference of outputs (B, K), relative to how far the images' outputs differ."""
    if found.shape != expected.shape:
        raise Unmapped(f"its outputs have the shape {list(expected.shape)}, those of timm's model {list(found.shape)}")
    spread = (expected - expected.mean(0)).abs().max().clamp(min=1e-6 * expected.abs().max() + 1e-12)
    return float((found - expected).abs().max() / spread)


class Origin:
    """The module that was taken apart: `compare` raises an InputError if the first photo has other outputs.

    A copy of the target has none, because its weights may change; nor has a target whose own weights were changed.

    Args:
        target: what became of the module. A twin of it, of the same weights, is compared, wherever it moves.
        outputs: function of normalised images (1, C, H, W) → outputs of the module, (1, K).
    """

    def __init__(self, target: Any, outputs: Callable[[Tensor], Tensor]) -> None:
        self.twin = copy.deepcopy(target, share_weights(target))
        self.outputs = outputs
        self.versions = self._versions()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _versions(self) -> list[int]:
        return [weight._version for weight in self.twin.parameters()]

    @torch.no_grad()
    def compare(self, target: Any, normalised: Tensor) -> None:
        """Compare the outputs of the first of normalised images (B, C, H, W), unless it is blank; only once."""
        image = normalised[:1].detach().to(self.twin.mean)
        if target.training or (image == image[..., :1, :1]).all():
            return
        target.origin = None
        if self.versions != self._versions():
            return
        with torch.autocast(image.device.type, enabled=False):
            found, expected = self.twin.outputs(image), self.outputs(image)
        if found.shape[1] == 2 * expected.shape[1] == 2:  # of a single logit
            found = found[:, 1:] - found[:, :1]
        span = expected.abs().max() if expected.shape[1] == 1 else expected.max() - expected.min()
        difference = float((found - expected).abs().max() / span)
        if not difference < TOLERANCE:
            target.origin = self
            classes = f"class {expected.argmax()}, not {found.argmax()}"
            raise InputError(
                f"{target.name}: the module itself gives this image other logits than its parts ({classes}; they differ"
                f" by {difference:.1g} of their range): explain it as it is, with as_target(model, whole=True)"
            )


def find_statistics(model: nn.Module) -> tuple[list[float], list[float]]:
    """Find mean and std of the pixels, from 0 to 1, on which a model of timm was trained, one for each channel.

    If its config states another number, one channel gets their mean, and others repeat them, as timm adapts the weights
    of the first layer; a warning says so.
    """
    config, count = timm.data.resolve_model_data_config(model), count_channels(model)
    known = config["mean"], config["std"]
    if {len(stated) for stated in known} == {count}:
        return list(known[0]), list(known[1])
    mean, std = (
        [sum(stated) / len(stated)] if count == 1 else [stated[i % len(stated)] for i in range(count)]
        for stated in known
    )
    warnings.warn(
        f"{type(model).__name__} of {count} channels: mean and std are guessed from those of {len(known[0])}: mean"
        f" {' '.join(f'{value:.3g}' for value in mean)}, std {' '.join(f'{value:.3g}' for value in std)}; give"
        " as_target(model, mean=, std=) if they are others",
        stacklevel=3,
    )
    return mean, std
