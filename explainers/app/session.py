"""Explaining many images with one model: the model and its explainer are built once."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm.data
import torch
from PIL import Image
from torch import Tensor, nn

from explainers import Explainer, VectorExplainer
from explainers.app.batch_size import batch_size_for
from explainers.app.checking import check_heatmaps, check_scores
from explainers.app.choosing import Method, choose, passes_of
from explainers.app.explanation import Explanation
from explainers.app.photos import Images, Photo, decoded_batches, photos_of
from explainers.app.prepared import PreparedClasses, PreparedTexts, prepare_model
from explainers.app.texts import is_image_tower, summarise, text_head_of, texts_of
from explainers.errors import InputError, check_integers, check_positive, checks_choices
from explainers.models.heads import NoHead
from explainers.models.names import class_index, class_names
from explainers.posthoc.defaults import Purpose
from explainers.runtime.modes import keep_random_state, ordinary_tensors
from explainers.text import TextHead

Classes = int | str | Sequence[int | str] | Tensor | np.ndarray | None
"""The class to explain, by name or index, or one for each image; `None` for the predicted ones."""

Prepare = Callable[[Tensor], Any]
"""Uint8 images (B, 3, S, S) on the device → `PreparedClasses` or `PreparedTexts`."""


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
        model: str | nn.Module,
        method: Method = "auto",
        weights: str | Path | None = None,
        device: str | torch.device | None = None,
        text_head: TextHead | None = None,
        purpose: Literal["auto"] | Purpose = "auto",
        batch_size: int | None = None,
    ) -> None:
        if batch_size is not None:
            check_positive(batch_size=batch_size)
        self.lock = threading.RLock()
        self.target = prepare_model(model, weights, device)
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
    def with_vectors(self) -> tuple[Explainer, str]:
        """The explainer if it has vectors of patches, otherwise one that has, to compare images; and its label."""
        if isinstance(self.explainer, VectorExplainer):
            return self.explainer, self.method
        with self.computing():
            return choose(self.target, purpose="likeness")

    def with_method(self, method: Method, purpose: Purpose) -> "Session":
        """A session with the same model and another explainer."""
        other = copy.copy(self)
        other.explainer, other.method = choose(self.target, method, purpose)
        return other

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the lock; what is computed inside has no graph."""
        with self.lock, ordinary_tensors():
            yield

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    @property
    def takes_texts(self) -> bool:
        """Whether the model has a text head, which may have to be loaded."""
        return self._text_head is not None or is_image_tower(self.target)

    def class_index(self, wanted: int | str) -> int:
        """Find a class by its name or index; an InputError names similar ones."""
        return class_index(wanted, self.names)

    def explain(
        self,
        images: Images,
        classes: Classes = None,
        top: int = 5,
        text: str | Sequence[str] | None = None,
        against: str | Sequence[str] | None = None,
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
        self,
        images: Images,
        classes: Classes = None,
        top: int = 5,
        text: str | Sequence[str] | None = None,
        against: str | Sequence[str] | None = None,
    ) -> Iterator[Explanation]:
        """Explain images one batch after the other, with the arguments of `explain`, and yield each explanation.

        Explanations of several images keep nothing on the device: another class of one of them, by `of`, takes a pass
        of this image. A progress bar appears after two seconds.
        """
        check_integers(top=top)
        check_positive(top=top)
        if text is None and against is not None:
            raise InputError("against= needs text=")
        if text is not None and classes is not None:
            raise InputError("classes= and text= exclude each other: leave out one of them")
        texts, others = (None, None) if text is None else texts_of(text, against)
        photos = photos_of(images)
        chosen = self.class_indices(classes, len(photos))
        for batch, pixels, numbers in self.batches(photos):
            wanted = [chosen[number] for number in numbers]
            (found,) = self.explain_batch(batch, pixels, [wanted], top, texts, others, alone=len(photos) == 1)
            yield from found

    def batches(
        self, photos: Sequence[Photo], doing: str = "explaining"
    ) -> Iterator[tuple[list[Photo], Tensor, list[int]]]:
        """Decode what the model sees of photos, one batch after the other, see `decoded_batches`."""
        size, passes = self.target.grid.image_size, passes_of(self.explainer)
        return decoded_batches(photos, size, self.resampling, self.batch_size, doing, passes)

    def explain_batch(
        self,
        photos: Sequence[Photo],
        pixels: Tensor,
        wanted: Iterable[Sequence[int | None]],
        top: int = 5,
        texts: Sequence[str] | None = None,
        against: Sequence[str] | None = None,
        alone: bool = False,
    ) -> list[list[Explanation]]:
        """Explain several classes or texts of a batch, which is prepared once.

        Args:
            photos: the photos.
            pixels: what the model sees of them, uint8 (B, 3, S, S).
            wanted: for each list of explanations, the index of a class, or of one of the `texts`, in each image; `None`
                for that with the highest score.
            top: number of most probable classes that an explanation lists.
            texts: texts to explain in place of classes.
            against: texts from whose mean each text is told apart.
            alone: whether to keep what was prepared of a single image, so that further classes cost no pass.
        """
        prepare: Prepare = partial(PreparedClasses, self.explainer, self.target)
        if texts is not None:
            prepare = partial(PreparedTexts, self.explainer, self.text_head, against=against)
        names = [photo.name for photo in photos]
        with self.computing():
            prepared = prepare(pixels.to(self.target.mean.device))
            scores = prepared.scores() if texts is None else prepared.scores(texts)
            check_scores(scores, names, "logits" if texts is None else "similarities", self.target.name)
            best = scores.argmax(-1).tolist()
            explained = [
                [own if index is None else index for index, own in zip(column, best, strict=True)] for column in wanted
            ]
            heatmaps = [
                prepared.heatmaps(column if texts is None else [texts[index] for index in column])
                for column in explained
            ]
        for each in heatmaps:
            check_heatmaps(each, names, self.method)
        kept = prepared if alone else None
        own_pixels = [each.clone() for each in pixels]  # a view would keep its batch
        return [
            [
                self._explanation(photo, image, score, heatmap, index, prepare, kept, top, texts, against)
                for photo, image, score, heatmap, index in zip(
                    photos, own_pixels, scores, of_column, column, strict=True
                )
            ]
            for of_column, column in zip(heatmaps, explained, strict=True)
        ]

    def _explanation(
        self,
        photo: Photo,
        image: Tensor,
        scores: Tensor,
        heatmap: Tensor,
        index: int,
        prepare: Prepare,
        prepared: Any,
        top: int,
        texts: Sequence[str] | None,
        against: Sequence[str] | None,
    ) -> Explanation:
        """One explanation. What is asked of it later is computed for its image alone, if it is not `prepared`."""
        settings: dict[str, Any] = {}
        if texts is not None:
            top = len(texts)
            settings["quantity"] = "similarity" if self.text_head.normalise else "score"
            settings["against"] = summarise(against)
            settings["score_of"] = partial(self._score_later, prepare, prepared, image)
        return Explanation(
            image,
            photo.name,
            scores.clone(),
            self.names if texts is None else texts,
            index,
            heatmap.clone(),
            self.method,
            self.target.name,
            top,
            partial(self._explain_later, prepare, prepared, image, photo.name, texts is None),
            file=photo.file,
            signed=getattr(self.explainer, "signed", None),
            **settings,
        )

    def _explain_later(
        self, prepare: Prepare, prepared: Any, image: Tensor, name: str, classes: bool, index: int, text: str
    ) -> Tensor:
        """The heatmap (P, P) of a class or a text in an image, uint8 (3, S, S), which may be `prepared` already."""
        with self.computing():
            prepared = prepared or prepare(image[None].to(self.target.mean.device))
            heatmaps = prepared.heatmaps([index if classes else text])
        check_heatmaps(heatmaps, [name], self.method)
        return heatmaps[0]

    def _score_later(self, prepare: Prepare, prepared: Any, image: Tensor, text: str) -> Tensor:
        """The score of a text in an image, (1,)."""
        with self.computing():
            prepared = prepared or prepare(image[None].to(self.target.mean.device))
            return prepared.scores([text])[0]

    def class_indices(self, classes: Classes, count: int) -> list[int | None]:
        """The class to explain in each of `count` images; `None` for the predicted one."""
        if isinstance(classes, Tensor | np.ndarray | np.generic):
            classes = classes.tolist()
        if classes is None:
            return [None] * count
        if isinstance(classes, str) or not isinstance(classes, Sequence):
            return [self.class_index(classes)] * count
        if len(classes) != count:
            raise InputError(
                f"classes= needs one class, or one for each of {count} images, got {len(classes)}: for several classes"
                " of an image, take explanation.of(...)"
            )
        return [self.class_index(each) for each in classes]
