"""What an explanation costs: forward passes of the target, announced and counted, seconds, and memory of the GPU."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers import DetailedExplainer, Details, Explainer
from explainers.masking import PatchGrid, read_heatmaps
from explainers.models import TargetModel

ENTRANCES = "forward_features", "forward_intermediates"
"""Functions of timm's models through which all forward passes go."""


def forward_passes(explainers: Mapping[str, object]) -> dict[str, int]:
    """Name of each explainer → the forward passes of the target that it announces for one image; at most, if they vary.

    >>> forward_passes({"chance": object()})
    {'chance': 1}
    """
    return {name: getattr(explainer, "forward_passes", 1) for name, explainer in explainers.items()}


def explain(
    explainer: Explainer, target: TargetModel, images: Tensor, classes: Tensor
) -> tuple[Details, int, float, float]:
    """Call an explainer, and measure what the call costs.

    Args:
        explainer: an explainer of the target, a module or any function.
        target: the model whose forward passes are counted.
        images: uint8, (B, C, H, W).
        classes: (B,).

    Returns:
        The explanation, the number of images that went through the target, the seconds, and the peak memory in GB, 0
        without a GPU.
    """
    on_gpu = images.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(images.device)
    start = now(images.device)
    with count_passes(target, explainer) as count:
        if isinstance(explainer, DetailedExplainer):
            explanation = explainer.details(images, classes)
        else:
            explanation = Details(explainer(images, classes))
    seconds = now(images.device) - start
    memory = torch.cuda.max_memory_allocated(images.device) / 1e9 if on_gpu else 0.0
    return explanation, passes_taken(explainer, count, len(images)), seconds, memory


def fit_heatmaps(heatmaps: Any, images: Tensor, grid: PatchGrid, name: str) -> Tensor:
    """What an explainer returns, see `read_heatmaps`, on the device of the images: (B, rows, columns).

    Heatmaps at pixels, (B, H, W) or (B, 1, H, W), are averaged over each patch, which a warning says once.
    """
    found = read_heatmaps(heatmaps, name).to(images.device)
    if found.dim() == 4 and found.shape[1] == 1:
        found = found[:, 0]
    if found.dim() == 3 and found.shape[1:] == grid.size != grid.shape:
        _say_averaged(name, grid.shape)
        found = F.adaptive_avg_pool2d(found, grid.shape)
    return found


@cache
def _say_averaged(name: str, shape: tuple[int, int]) -> None:
    warnings.warn(f"{name}: heatmaps at pixels are averaged over {shape[0]} × {shape[1]} patches", stacklevel=2)


def now(device: torch.device) -> float:
    """Seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def find_modules(explainers: Iterable[object]) -> nn.ModuleList:
    """The explainers that are modules; any function is an explainer, too."""
    return nn.ModuleList(explainer for explainer in explainers if isinstance(explainer, nn.Module))


@dataclass
class Count:
    """Number of `images` that a model has computed; `inside` is True during a forward pass."""

    images: int = 0
    inside: bool = False


@contextmanager
def count_passes(*explainers: object) -> Iterator[Count]:
    """Count the images that go through every `TargetModel` of these modules; one batch of 8 masked images counts 8.

    Models inside the `network` of a learned explainer are not counted.

    >>> import timm, torch
    >>> target = TargetModel(timm.create_model("test_vit", num_classes=2))
    >>> with count_passes(target) as count:
    ...     _ = target(torch.zeros(3, 3, 160, 160, dtype=torch.uint8))
    >>> count.images
    3
    """
    named = [pair for pair in find_modules(explainers).named_modules() if isinstance(pair[1], TargetModel)]
    backbones = {id(part.backbone): part.backbone for name, part in named if "network" not in name.split(".")}
    count = Count()
    with ExitStack() as stack:
        for backbone in backbones.values():
            for name in ENTRANCES:
                if hasattr(backbone, name):
                    stack.enter_context(patch.object(backbone, name, _counting(getattr(backbone, name), count)))
        yield count


def passes_taken(explainer: object, count: Count, images: int) -> int:
    """The counted passes for a number of images; an explainer that reads a cache or no target announces its own."""
    counted = count.images if getattr(explainer, "timed", True) else 0
    return counted or getattr(explainer, "forward_passes", 1) * images


def _counting(passed: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A method of a backbone that also counts its images. One entrance may call the other."""

    def forward(images: Tensor, *args: Any, **kwargs: Any) -> Any:
        if count.inside:
            return passed(images, *args, **kwargs)
        count.images += len(images)
        count.inside = True
        try:
            return passed(images, *args, **kwargs)
        finally:
            count.inside = False

    return forward
