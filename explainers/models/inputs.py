"""Checks of the inputs of models and explainers: images, labels, classes and functionals to explain."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from explainers.errors import InputError

WHITE = {torch.uint8: 255, torch.uint16: 65535}
"""Types of images, and their value of white."""

Functionals = Tensor | Callable[[Tensor], Tensor]
"""Functionals v of each image, (B, D) or (B, V, D); or a function of the embeddings (B, D) → v (B, V, D)."""


def zero_to_one(images: Tensor) -> Tensor:
    """Scale images (B, C, H, W) of 8 bits, uint8, or of 16 bits, uint16, to float32 in [0, 1].

    >>> zero_to_one(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).tolist()
    [[[[0.0, 1.0]]]]

    Raises:
        InputError: for images of another type, which may be scaled already, or for a single image (C, H, W).
    """
    if images.dtype not in WHITE:
        raise InputError(
            f"expected uint8 images, which every model normalises itself, got {_name(images)}: give the pixels of the"
            " file, from 0 to 255"
        )
    if images.dim() != 4:
        raise InputError(
            f"expected images of shape (B, C, H, W), got {list(images.shape)}: give a single image as images[None]"
        )
    return images.float() / WHITE[images.dtype]


def check_labels(labels: Tensor, num_classes: int, otherwise: str, *settings: str) -> None:
    """Raise an InputError unless all labels, integers (B,), are from 0 to K − 1; −1 stands for an unlabelled image.

    `otherwise` is what the message recommends to users without labels, such as a setting.
    """
    lowest, highest = torch.stack(labels.aminmax()).tolist()
    if lowest < 0 or highest >= num_classes:
        raise InputError(
            f"expected labels from 0 to {num_classes - 1}, got {lowest} to {highest}, where -1 is an image without a"
            f" label: take labelled images, or {otherwise}",
            *settings,
        )


def validate_classes(classes: Tensor, images: Tensor, num_classes: int) -> Tensor:
    """Return the classes to explain as int64; an InputError unless they are one integer from 0 to K − 1 for each image.

    >>> validate_classes(torch.tensor([2], dtype=torch.int32), torch.zeros(1, 3, 4, 4), num_classes=3).dtype
    torch.int64
    """
    if not isinstance(classes, Tensor):
        raise InputError(
            f"expected one class for each of {len(images)} images as a tensor, got {classes!r}: give"
            f" torch.full(({len(images)},), 0) to explain class 0 in all images"
        )
    if classes.shape != images.shape[:1] or classes.is_floating_point():
        raise InputError(
            f"expected one class for each of {len(images)} images, integers of shape [{len(images)}], got"
            f" {_name(classes)} of shape {list(classes.shape)}"
        )
    if torch.compiler.is_compiling():  # a compiled graph cannot branch on values
        return classes.long()
    lowest, highest = torch.stack(classes.aminmax()).tolist() if len(classes) else (0, 0)
    if lowest < 0 or highest >= num_classes:
        raise InputError(
            f"expected classes of the explained model, from 0 to {num_classes - 1}, got {lowest} to {highest}"
        )
    return classes.long()


def check_functionals(functionals: Tensor, images: Tensor, width: int) -> None:
    """Raise an InputError unless there is one functional of the embedding for each image, (B, D), or V, (B, V, D).

    >>> check_functionals(torch.zeros(1, 8), torch.zeros(1, 3, 4, 4), width=8)
    """
    shape = list(functionals.shape)
    if len(shape) not in (2, 3) or shape[0] != len(images) or shape[-1] != width or not functionals.is_floating_point():
        raise InputError(
            f"expected functionals of the embedding, floating point of shape [{len(images)}, {width}] or"
            f" [{len(images)}, V, {width}], got {_name(functionals)} of shape {shape}"
        )


def check_explains_functionals(explainer: Any) -> None:
    """Raise an InputError for an explainer that explains classes alone, such as RISE."""
    if not hasattr(explainer, "explain"):
        raise InputError(
            f"expected an explainer of any functional of the embedding, got {type(explainer).__name__}, which"
            " explains classes alone: take AnyHead, or a method such as DecompX-SkipPLUS"
        )


def resolve_functionals(functionals: Functionals, images: Tensor, width: int) -> Callable[[Tensor], Tensor]:
    """A function of the embeddings (B, D) → functionals (B, V, D), checked; V is 1 for functionals (B, D)."""
    if isinstance(functionals, Tensor):
        check_functionals(functionals, images, width)
        given = functionals if functionals.dim() == 3 else functionals[:, None]
        return lambda _: given

    def checked(embeddings: Tensor) -> Tensor:
        computed = functionals(embeddings)
        check_functionals(computed, images, width)
        return computed

    return checked


def _name(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
