"""Explaining many images with one model: the model and its explainer are built once."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch
from PIL import Image
from torch import Tensor

from explainers import PreparedExplainer
from explainers.app.choosing import choose
from explainers.app.explanation import Explanation
from explainers.app.photos import Photo, decoded, photos_of
from explainers.conversion import as_target
from explainers.errors import InputError, check_positive
from explainers.images.listing import several
from explainers.progress import progress
from explainers.target import TargetModel
from explainers.target.names import class_index, class_names

BATCH = 16
"""Number of images that are explained at once."""


class Session:
    """A model, and an explainer for it.

    Args:
        model: a name of timm, a module, or a `TargetModel`, see `as_target`. It is not changed.
        method: see `choose`.
        weights: file of the weights of a name of timm; `None` for timm's own.
        device: where to compute; `None` for the device of the module, or a GPU for a name of timm.

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
        target = as_target(model, weights)
        target = copy.deepcopy(target) if target is model else target  # explainers freeze it
        if device is None and isinstance(model, str) and torch.cuda.is_available():
            device = "cuda"
        _check_colour(target)
        self.target = _moved(target, device).eval()
        self.names = class_names(self.target)
        self.explainer, self.method = choose(self.target, method)
        config = timm.data.resolve_model_data_config(self.target.backbone)
        self.resampling = getattr(Image.Resampling, config["interpolation"].upper(), Image.Resampling.BICUBIC)

    def class_index(self, wanted: int | str) -> int:
        """Find a class by its name or index; an InputError names similar ones."""
        return class_index(wanted, self.names)

    def explain(self, images: Any, classes: Any = None, top: int = 5) -> list[Explanation]:
        """Explain images.

        Args:
            images: see `photos_of`.
            classes: the class to explain, by name or index, or one for each image; `None` for the predicted ones.
            top: number of most probable classes that an explanation lists.

        Returns:
            A list, also for a single image.

        Raises:
            InputError: for images that cannot be read, and for classes that the model does not have. Broken files of a
                folder are left out with a warning.
        """
        return list(self.stream(images, classes, top))

    def stream(self, images: Any, classes: Any = None, top: int = 5) -> Iterator[Explanation]:
        """Explain images one batch after the other, with the arguments of `explain`, and yield each explanation.

        A progress bar appears after two seconds.
        """
        check_positive(top=top)
        photos = photos_of(images)
        chosen = self._indices(classes, len(photos))
        broken: list[Photo] = []
        with progress("explaining", len(photos), "image", delay=2) as bar:
            for start in range(0, len(photos), BATCH):
                batch = photos[start : start + BATCH]
                squares = [decoded(photo, self.target.grid.image_size, self.resampling) for photo in batch]
                broken += [photo for photo, square in zip(batch, squares, strict=True) if square is None]
                kept = [number for number, square in enumerate(squares) if square is not None]
                if kept:
                    pixels = torch.stack([square for square in squares if square is not None])
                    wanted = [chosen[start + number] for number in kept]
                    yield from self._explain([batch[number] for number in kept], pixels, wanted, top)
                bar.update(len(batch))
        tell_broken(broken, len(photos))

    @torch.no_grad()
    def _explain(
        self, photos: Sequence[Photo], pixels: Tensor, wanted: Sequence[int | None], top: int
    ) -> list[Explanation]:
        """Explain a batch: uint8 pixels (B, 3, S, S), and the class of each image, `None` for the predicted one."""
        images = pixels.to(self.target.mean.device)
        probabilities = self.target(images).float().softmax(-1).cpu()
        predicted = probabilities.argmax(-1).tolist()
        classes = [own if one is None else one for one, own in zip(wanted, predicted, strict=True)]
        prepared = self.explainer.prepare(images) if isinstance(self.explainer, PreparedExplainer) else None
        heatmaps = (prepared or partial(self.explainer, images))(torch.tensor(classes, device=images.device))
        if heatmaps.shape[:1] != images.shape[:1] or heatmaps.dim() != 3:
            raise InputError(
                f"expected heatmaps (B, P, P) of {len(images)} images from {self.method}, got {list(heatmaps.shape)}"
            )
        return [
            Explanation(
                image=pixels[row],
                name=photo.name,
                probabilities=probabilities[row],
                names=self.names,
                index=classes[row],
                heatmap=heatmaps[row].float().cpu(),
                method=self.method,
                model=self.target.name,
                top=top,
                heatmap_of=partial(self._heatmap, images, prepared, row),
                file=photo.file,
            )
            for row, photo in enumerate(photos)
        ]

    @torch.no_grad()
    def _heatmap(self, images: Tensor, prepared: Callable[[Tensor], Tensor] | None, row: int, index: int) -> Tensor:
        """The heatmap (P, P) of a class in one image of a batch; without a pass if the batch is `prepared`."""
        classes = torch.full((len(images),), index, device=images.device)
        one = slice(row, row + 1)
        heatmap = self.explainer(images[one], classes[one])[0] if prepared is None else prepared(classes)[row]
        return heatmap.float().cpu()

    def _indices(self, classes: Any, count: int) -> list[int | None]:
        """The class to explain in each of `count` images; `None` for the predicted one."""
        classes = classes.tolist() if isinstance(classes, Tensor | np.ndarray | np.generic) else classes
        if classes is None:
            return [None] * count
        if isinstance(classes, str) or not isinstance(classes, Sequence):
            return [self.class_index(classes)] * count
        if len(classes) != count:
            raise InputError(
                f"expected one class, or one for each of {count} images, got {len(classes)}: for several classes of an"
                " image, take explanation.of(...)"
            )
        return [self.class_index(each) for each in classes]


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


def tell_broken(broken: Sequence[Photo], count: int) -> None:
    """Warn of files in folders that could not be decoded; an InputError if no image is left."""
    if not broken:
        return
    files = f"{several([Path(photo.name) for photo in broken])} that cannot be decoded"
    if len(broken) == count:
        raise InputError(f"expected images, got {files}: give another folder")
    warnings.warn(f"left out: {files}", stacklevel=3)
