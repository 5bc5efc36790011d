"""Explaining many images with one model: the model and its explainer are built once."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm.data
import torch
from PIL import Image
from torch import Tensor

from explainers import PreparedExplainer, VectorExplainer
from explainers.app.batch_size import batch_size_for
from explainers.app.checking import check_heatmaps, check_scores
from explainers.app.choosing import choose, passes_of
from explainers.app.explanation import Explanation
from explainers.app.models import model_of_colour
from explainers.app.photos import Photo, decoded_batches, photos_of
from explainers.app.texts import PreparedTexts, in_words, is_image_tower, text_head_of, texts_of
from explainers.errors import InputError, check_integers, check_positive, checks_choices
from explainers.models.heads import NoHead
from explainers.models.names import class_index, class_names
from explainers.runtime.modes import keep_random_state, ordinary_tensors
from explainers.text import TextHead


class Session:
    """A model, and an explainer for it. Threads may share a session: `lock` lets one compute at a time.

    Args:
        model: a name of timm, a module, or a `TargetModel`, see `as_target`. It is not changed.
        method: see `choose`.
        weights: file of the weights of a name of timm; `None` for timm's own.
        device: where to compute; `None` for the device of the module, or a GPU for a name of timm.
        text_head: what turns texts into functionals of the embedding; `None` for that of CLIP and SigLIP, which is
            loaded when a text is explained.
        purpose: what the method `auto` chooses an explainer for; `auto` for classes, or for texts if there is a
            `text_head`, or if the model has no classes.
        batch_size: number of images that are explained at once; `None` for as many as `batch_size_for` finds.

    Attributes:
        target: the model.
        explainer: a function of images (B, 3, S, S) and classes (B,) → heatmaps (B, P, P).
        method: label of the explainer.
        names: readable names of the classes; empty if texts or likeness are explained of a model without classes.
        lock: a re-entrant lock, held while the model computes, because methods change it for the time of a call.
    """

    @keep_random_state()
    @ordinary_tensors()
    @checks_choices
    def __init__(
        self,
        model: Any,
        method: Any = "auto",
        weights: str | Path | None = None,
        device: str | torch.device | None = None,
        text_head: TextHead | None = None,
        purpose: Literal["auto", "classes", "texts", "likeness"] = "auto",
        batch_size: int | None = None,
    ) -> None:
        if batch_size is not None:
            check_positive(batch_size=batch_size)
        self.lock = threading.RLock()
        self.target = model_of_colour(model, weights, device)
        without = isinstance(self.target.head, NoHead) or is_image_tower(self.target)
        if purpose == "auto":
            purpose = "texts" if without or text_head is not None else "classes"
        self.names = [] if without and purpose != "classes" else class_names(self.target)
        self.explainer, self.method = choose(self.target, method, purpose)
        self._batch_size = batch_size
        self._text_head = None if text_head is None else text_head_of(self.target, text_head)
        config = timm.data.resolve_model_data_config(self.target.backbone)
        self.resampling = getattr(Image.Resampling, config["interpolation"].upper(), Image.Resampling.BICUBIC)

    @property
    def batch_size(self) -> int:
        """Number of images that are explained at once."""
        return self._batch_size or batch_size_for(self.explainer, self.target)

    @cached_property
    def text_head(self) -> TextHead:
        """The text head of the model; an InputError if it has none."""
        with self.computing():
            return self._text_head or text_head_of(self.target)

    @cached_property
    def with_vectors(self) -> tuple[Any, str]:
        """The explainer if it has vectors of patches, otherwise one that has, to compare images; and its label."""
        if isinstance(self.explainer, VectorExplainer):
            return self.explainer, self.method
        with self.computing():
            return choose(self.target, purpose="likeness")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the lock; what is computed inside has no graph."""
        with self.lock, ordinary_tensors():
            yield

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    def _compute(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        with self.computing():
            return function(*arguments)

    def _compute_heatmap(self, name: str, heatmap_of: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Compute a heatmap (P, P) of the image with this name, and check it."""
        heatmap = self._compute(heatmap_of, *arguments)
        check_heatmaps(heatmap[None], [name], self.method)
        return heatmap

    @property
    def takes_texts(self) -> bool:
        """Whether the model has a text head, which may have to be loaded."""
        return self._text_head is not None or is_image_tower(self.target)

    def class_index(self, wanted: int | str) -> int:
        """Find a class by its name or index; an InputError names similar ones."""
        return class_index(wanted, self.names)

    def explain(
        self, images: Any, classes: Any = None, top: int = 5, text: Any = None, against: Any = None
    ) -> list[Explanation]:
        """Explain images.

        Args:
            images: see `photos_of`.
            classes: the class to explain, by name or index, or one for each image; `None` for the predicted ones.
            top: number of most probable classes that an explanation lists.
            text: a text, or several, of which that with the highest score is explained, in place of a class.
            against: a text, or several, from whose mean each text is told apart.

        Returns:
            A list, also for a single image.

        Raises:
            InputError: for images that cannot be read, for classes that the model does not have, and for texts if the
                model or the method cannot explain them. Broken files of a folder are left out with a warning.
        """
        return list(self.stream(images, classes, top, text, against))

    def stream(
        self, images: Any, classes: Any = None, top: int = 5, text: Any = None, against: Any = None
    ) -> Iterator[Explanation]:
        """Explain images one batch after the other, with the arguments of `explain`, and yield each explanation.

        A progress bar appears after two seconds.
        """
        check_integers(top=top)
        check_positive(top=top)
        if text is None and against is not None:
            raise InputError("expected text beside against, got against alone: give text=")
        if text is not None and classes is not None:
            raise InputError("expected classes or text, got both: leave out one of them")
        texts = None if text is None else texts_of(text, against)
        photos = photos_of(images)
        chosen = self._indices(classes, len(photos))
        for batch, pixels, numbers in self.batches(photos):
            with self.computing():
                if texts is None:
                    found = self._classes(batch, pixels, [chosen[number] for number in numbers], top)
                else:
                    found = self._texts(batch, pixels, *texts)
            yield from found

    def batches(
        self, photos: Sequence[Photo], doing: str = "explaining"
    ) -> Iterator[tuple[list[Photo], Tensor, list[int]]]:
        """Decode what the model sees of photos, one batch after the other, see `decoded_batches`."""
        size, passes = self.target.grid.image_size, passes_of(self.explainer)
        return decoded_batches(photos, size, self.resampling, self.batch_size, doing, passes)

    def _classes(
        self, photos: Sequence[Photo], pixels: Tensor, wanted: Sequence[int | None], top: int
    ) -> list[Explanation]:
        """Explain a batch: uint8 pixels (B, 3, S, S), and the class of each image, `None` for the predicted one."""
        images = pixels.to(self.target.mean.device)
        probabilities = self.target(images).float().softmax(-1).cpu()
        check_scores(probabilities, [photo.name for photo in photos], "logits", self.target.name)
        predicted = probabilities.argmax(-1).tolist()
        classes = [own if one is None else one for one, own in zip(wanted, predicted, strict=True)]
        prepared = self.explainer.prepare(images) if isinstance(self.explainer, PreparedExplainer) else None
        heatmaps = (prepared or partial(self.explainer, images))(torch.tensor(classes, device=images.device))
        if heatmaps.shape[:1] != images.shape[:1] or heatmaps.dim() != 3:
            raise InputError(
                f"expected heatmaps (B, P, P) of {len(images)} images from {self.method}, got {list(heatmaps.shape)}"
            )
        return self._explanations(
            photos,
            pixels,
            probabilities,
            self.names,
            classes,
            heatmaps.float().cpu(),
            top=top,
            heatmap_of=partial(self._heatmap, images, prepared),
        )

    def _texts(
        self, photos: Sequence[Photo], pixels: Tensor, texts: list[str], against: list[str] | None
    ) -> list[Explanation]:
        """Explain in each image of a batch, uint8 pixels (B, 3, S, S), the text with the highest score."""
        prepared = PreparedTexts(self.explainer, self.text_head, pixels.to(self.target.mean.device), against)
        scores = prepared.scores(texts)
        check_scores(scores, [photo.name for photo in photos], "similarities", self.target.name)
        best = scores.argmax(-1).tolist()
        heatmaps = prepared.heatmaps([texts[index] for index in best])
        return self._explanations(
            photos,
            pixels,
            scores,
            texts,
            best,
            heatmaps,
            top=len(texts),
            heatmap_of=prepared.heatmap,
            quantity="similarity" if self.text_head.normalise else "score",
            against=in_words(against),
            score_of=prepared.score,
        )

    def _explanations(
        self,
        photos: Sequence[Photo],
        pixels: Tensor,
        scores: Tensor,
        names: Sequence[str],
        indices: Sequence[int],
        heatmaps: Tensor,
        heatmap_of: Callable[..., Tensor],
        score_of: Callable[..., Tensor] | None = None,
        **settings: Any,
    ) -> list[Explanation]:
        """One explanation for each image of a batch; `heatmap_of` and `score_of` take the row of the image first."""
        check_heatmaps(heatmaps, [photo.name for photo in photos], self.method)
        return [
            Explanation(
                pixels[row],
                photo.name,
                scores[row],
                names,
                indices[row],
                heatmaps[row],
                self.method,
                self.target.name,
                heatmap_of=partial(self._compute_heatmap, photo.name, heatmap_of, row),
                score_of=None if score_of is None else partial(self._compute, score_of, row),
                signed=getattr(self.explainer, "signed", None),
                file=photo.file,
                **settings,
            )
            for row, photo in enumerate(photos)
        ]

    def _heatmap(
        self, images: Tensor, prepared: Callable[[Tensor], Tensor] | None, row: int, index: int, name: str
    ) -> Tensor:
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
