"""Explaining many images with one model: the model and its explainer are built once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from explainers import conversion
from explainers.app.choosing import choose
from explainers.app.explanation import Explanation
from explainers.target import TargetModel
from explainers.target.names import class_index, class_names

BATCH = 16
"""Number of images that are explained at once."""


class Session:
    """A model, and an explainer for it.

    Args:
        model: a name of timm, a module, or a `TargetModel`, see `as_target`. It is not changed.
        method: see `choose`.
        weights: file of the model's weights; `None` for those of timm.
        device: where to compute; `None` for the model's device, or a GPU for a name of timm.

    Attributes:
        target: the model.
        explainer: a function of images (B, 3, S, S) and classes (B,) → heatmaps (B, P, P).
        method: label of the explainer.
        names: readable names of the classes.
    """

    def __init__(
        self,
        model: Any,
        method: Any = "auto",
        weights: str | Path | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.target: TargetModel = conversion.as_target(model, weights).eval()  # type: ignore[attr-defined]
        self.names = class_names(self.target)
        self.explainer, self.method = choose(self.target, method)

    def class_index(self, wanted: int | str) -> int:
        """Find a class by its name or index; an InputError names similar ones."""
        return class_index(wanted, self.names)

    def explain(self, images: Any, classes: Any = None, top: int = 5) -> list[Explanation]:
        """Explain images.

        Args:
            images: see `photos_of`.
            classes: the class to explain, by name or index, or one for each image; `None` for the predicted ones.
            top: number of most probable classes that an explanation lists.
        """
        return list(self.stream(images, classes, top))

    def stream(self, images: Any, classes: Any = None, top: int = 5) -> Iterator[Explanation]:
        """Explain images one after the other, with the arguments of `explain`; many need not fit into the memory."""
        raise NotImplementedError
