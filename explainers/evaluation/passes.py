"""Forward passes of the target that an explainer announces, and those that it takes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from explainers.target import TargetModel

ENTRANCES = "forward_features", "forward_intermediates"
"""Functions of timm's models through which all forward passes go."""


def forward_passes(explainers: Mapping[str, object]) -> dict[str, int]:
    """Name of each explainer → the forward passes of the target that it announces for one image; at most, if they vary.

    >>> forward_passes({"chance": object()})
    {'chance': 1}
    """
    return {name: getattr(explainer, "forward_passes", 1) for name, explainer in explainers.items()}


@dataclass
class Count:
    """Number of `images` that went through a model."""

    images: int = 0
    inside: bool = False


@contextmanager
def counted_passes(*modules: nn.Module) -> Iterator[Count]:
    """Count the images that go through every `TargetModel` of these modules; one batch of 8 masked images counts 8.

    What a learned explainer's own `network` contains is no target.

    >>> import timm, torch
    >>> target = TargetModel(timm.create_model("test_vit", num_classes=2))
    >>> with counted_passes(target) as count:
    ...     _ = target(torch.zeros(3, 3, 160, 160, dtype=torch.uint8))
    >>> count.images
    3
    """
    named = [pair for module in modules for pair in module.named_modules() if isinstance(pair[1], TargetModel)]
    backbones = {id(part.backbone): part.backbone for name, part in named if "network" not in name.split(".")}
    count = Count()
    with ExitStack() as stack:
        for backbone in backbones.values():
            for name in ENTRANCES:
                if hasattr(backbone, name):
                    stack.enter_context(_replaced(backbone, name, count))
        yield count


def passes_taken(explainer: object, count: Count, images: int) -> int:
    """The counted passes for a number of images; of an explainer that reads a cache or no target, what it says."""
    counted = count.images if getattr(explainer, "timed", True) else 0
    return counted or getattr(explainer, "forward_passes", 1) * images


@contextmanager
def _replaced(backbone: Any, name: str, count: Count) -> Iterator[None]:
    """An instance attribute hides the method, which stays untouched; one entrance may call the other."""
    attributes, passed = vars(backbone), getattr(backbone, name)
    before = {key: attributes[key] for key in (name,) if key in attributes}
    attributes[name] = _counting(passed, count)
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


def _counting(passed: Callable[..., Any], count: Count) -> Callable[..., Any]:
    def forward(images: Tensor, *args: Any, **kwargs: Any) -> Any:
        if count.inside:
            return passed(images, *args, **kwargs)
        count.images, count.inside = count.images + len(images), True
        try:
            return passed(images, *args, **kwargs)
        finally:
            count.inside = False

    return forward
