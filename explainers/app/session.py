"""Explaining images: `explainers.explain` for one call, and `Session` for many with one model."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn

from explainers import Explainer, VectorExplainer
from explainers.app.batches import PreparedClasses, PreparedTexts, check_heatmaps, check_scores, is_signed
from explainers.app.choosing import (
    Method,
    choose,
    choose_batch_size,
    estimate_passes,
    find_text_head,
    is_image_tower,
    own_text_head,
    prepare_model,
)
from explainers.app.explanation import Explanation
from explainers.app.photos import Images, OneImage, Photo, decode_batches, decode_photos, is_single, list_photos
from explainers.errors import InputError, check_positive, checks_choices
from explainers.models.heads import NoHead
from explainers.models.names import class_index, class_names, find_image_classes, find_other_classes
from explainers.posthoc.defaults import Purpose
from explainers.runtime.locks import ModelLock
from explainers.runtime.modes import keep_random_state, ordinary_tensors
from explainers.text import TextHead
from explainers.text.encoders import validate_texts

Classes = int | str | Sequence[int | str] | Tensor | np.ndarray | None
"""The class to explain, by name or index, or one for each image; `None` for the predicted ones."""

Against = int | str | Sequence[int | str] | None
"""Other classes, by name or index, or other texts."""


class Settings(TypedDict, total=False):
    """Keyword arguments of `explain`, for its overloads: a new one is added here, too."""

    classes: Classes
    method: Method
    top: int
    text: str | Sequence[str] | None
    against: Against
    text_head: TextHead | None


@overload
def explain(  # type: ignore[overload-overlap]  # a text is a path, although it is iterable, too
    images: OneImage, model: str | nn.Module, **settings: Unpack[Settings]
) -> Explanation: ...


@overload
def explain(images: Iterable[OneImage], model: str | nn.Module, **settings: Unpack[Settings]) -> list[Explanation]: ...


def explain(
    images: Images,
    model: str | nn.Module,
    *,
    classes: Classes = None,
    method: Method = "auto",
    top: int = 5,
    text: str | Sequence[str] | None = None,
    against: Against = None,
    text_head: TextHead | None = None,
) -> Explanation | list[Explanation]:
    """Explain what a model sees in images.

    To explain images again and again with one model, make a `Session`, which builds the model once.

    Args:
        images: a path, a folder (with all folders below it), a PIL image, pixels as an array or a tensor, or a list of
            them. For a model of other than 1 or 3 channels, arrays (H, W, C) or (C, H, W), .npy files, or GeoTIFF.
        model: a name of timm, which computes on a GPU if there is one; a module; or a `TargetModel`, which `as_target`
            makes with other weights, another head, image size, score or device. It is not changed.
        classes: the class to explain, by name or index, or one for each image; `None` for the predicted ones.
        method: `auto` takes a trained explainer if one is shipped for this backbone, else the method that fits best. Or
            a method of `explainers.posthoc`, the folder of a trained explainer, or an explainer, see `choose`.
        top: number of most probable classes that an explanation lists.
        text: where is what a text describes? A text, or several; the one with the highest similarity is explained,
            like the most probable class; `explanation.of(...)` explains another one, or any further text.
        against: another class, or several: why this class rather than those? The heatmap shows what tells the class
            (by default the most probable other one) apart from their mean. Beside `text`, other texts.
        text_head: turns texts into functionals of the embedding; `None` for the text tower of CLIP or SigLIP.

    Returns:
        An `Explanation` of one image; a list for a list, a folder, or a batch in one array. A type checker cannot tell
        a folder from a file, nor a batch from an image: there, put it into a list, as in `explain(["photos/"], model)`.

    Raises:
        InputError: for images that cannot be read, and for what the model or the method cannot explain.
    """
    if text is None and text_head is not None:
        raise InputError("text_head= needs text=")
    purpose: Purpose = "classes" if text is None else "texts"
    session = Session(model, method, text_head, purpose)
    explanations = session.explain(images, classes, top=top, text=text, against=against)
    return explanations[0] if is_single(images) else explanations


class Session:
    """A model, and an explainer for it. Threads may share a session: `lock` lets one compute at a time.

    Args:
        model: see `explain`. It is not changed.
        method: see `choose`.
        text_head: see `explain`; it is loaded when a text is explained.
        purpose: what `auto` chooses an explainer for; `auto` for texts if there is a `text_head`, or no classes.
        batch_size: number of images that are explained at once; `None` for as many as `choose_batch_size` finds.

    Attributes:
        target: the model.
        transform: how photos become its images, in explanations, the page, audits and measurements alike.
        pixels: the format of its images.
        explainer: a function of images (B, C, H, W) and classes (B,) → heatmaps (B, rows, columns).
        method: label of the explainer.
        names: readable names of the classes; empty if texts or likeness are explained of a model without classes.
        lock: held while the model computes, because methods change it for the time of a call; forks wait for it.
    """

    @keep_random_state()
    @ordinary_tensors()
    @checks_choices
    def __init__(
        self,
        model: str | nn.Module,
        method: Method = "auto",
        text_head: TextHead | None = None,
        purpose: Literal["auto"] | Purpose = "auto",
        batch_size: int | None = None,
    ) -> None:
        if batch_size is not None:
            check_positive(batch_size=batch_size)
        self.lock = ModelLock()
        self.target = prepare_model(model)
        if text_head is None and purpose != "classes":
            text_head = own_text_head(model, self.target)
        without = isinstance(self.target.head, NoHead) or is_image_tower(self.target)
        if purpose == "auto":
            purpose = "texts" if without or text_head is not None else "classes"
        self.names = [] if without and purpose != "classes" else class_names(self.target)
        self.explainer, self.method = choose(self.target, method, purpose)
        self._with_vectors: tuple[Explainer, str] | None = None
        self._batch_size = batch_size
        self._text_head = None if text_head is None else find_text_head(self.target, text_head)
        self.transform = self.target.transform
        self.pixels = self.target.pixels

    @property
    def batch_size(self) -> int:
        """Number of images that are explained at once."""
        return self._batch_size or choose_batch_size(self.explainer, self.target)

    @property
    def takes_texts(self) -> bool:
        """Whether the model has a text head, which may have to be loaded."""
        return self._text_head is not None or is_image_tower(self.target)

    @property
    def text_head(self) -> TextHead:
        """The text head of the model; an InputError if it has none."""
        if self._text_head is None:
            with self.computing():
                self._text_head = self._text_head or find_text_head(self.target)
        return self._text_head

    def quantity(self, of_texts: bool) -> str:
        """What scores are: `probability`, or `value`, as of a regression; of texts `similarity`, or `score`."""
        if of_texts:
            return "similarity" if self.text_head.normalise else "score"
        return "value" if self.target.score == "value" else "probability"

    @property
    def with_vectors(self) -> tuple[Explainer, str]:
        """The explainer if it has vectors of patches, otherwise one that has, to compare images; and its label."""
        if isinstance(self.explainer, VectorExplainer):
            return self.explainer, self.method
        with self.computing():
            self._with_vectors = self._with_vectors or choose(self.target, purpose="likeness")
        return self._with_vectors

    def with_method(self, method: Method, purpose: Purpose) -> "Session":
        """A session with the same model and another explainer."""
        other = copy.copy(self)
        other.explainer, other.method = choose(self.target, method, purpose)
        return other

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the lock; tensors computed inside have no graph."""
        with self.lock, ordinary_tensors():
            yield

    def class_index(self, wanted: int | str) -> int:
        """Find a class by its name or index; an InputError names similar ones."""
        return class_index(wanted, self.names)

    def explain(
        self,
        images: Images,
        classes: Classes = None,
        top: int = 5,
        text: str | Sequence[str] | None = None,
        against: Against = None,
    ) -> list[Explanation]:
        """Explain images, with the arguments and errors of `explainers.explain`; a list, also for a single image.

        Broken files of a folder are left out with a warning.
        """
        return list(self.stream(images, classes, top=top, text=text, against=against))

    def stream(
        self,
        images: Images,
        classes: Classes = None,
        top: int = 5,
        text: str | Sequence[str] | None = None,
        against: Against = None,
    ) -> Iterator[Explanation]:
        """Explain images one batch after the other, with the arguments of `explain`, and yield each explanation.

        Explanations of several images keep nothing on the device: another class of one of them, by `of`, takes a pass
        of this image. A progress bar appears after two seconds.
        """
        check_positive(top=top)
        if text is not None and classes is not None:
            raise InputError("classes= and text= exclude each other: leave out one of them")
        texts = None if text is None else list(dict.fromkeys(validate_texts(text)))
        photos = list_photos(images)
        chosen = find_image_classes(classes, self.names, len(photos))
        others: Sequence[Any] = ()
        if texts is None:
            others = find_other_classes(against, chosen, self.names)
        elif against is not None:
            others = validate_texts(against)  # type: ignore[arg-type]  # it checks them
        for batch, pixels, numbers in self.batches(photos, passes=estimate_passes(self.explainer, others)):
            wanted = [chosen[number] for number in numbers]
            (found,) = self.explain_batch(batch, pixels, [wanted], top, texts, others, alone=len(photos) == 1)
            yield from found

    def decode(self, photos: Sequence[Photo]) -> tuple[list[Photo], Tensor]:
        """Decode what the model sees of photos; an InputError if one is broken, see `decode_photos`."""
        return decode_photos(photos, self.transform, self.pixels)

    def batches(
        self,
        photos: Sequence[Photo],
        doing: str = "explaining",
        batch_size: int | None = None,
        passes: int | None = None,
    ) -> Iterator[tuple[list[Photo], Tensor, list[int]]]:
        """Decode what the model sees of photos, one batch after the other, see `decode_batches`."""
        passes = estimate_passes(self.explainer) if passes is None else passes
        return decode_batches(photos, self.transform, self.pixels, batch_size or self.batch_size, doing, passes)

    def explain_batch(
        self,
        photos: Sequence[Photo],
        pixels: Tensor,
        wanted: Iterable[Sequence[int | None]],
        top: int = 5,
        texts: Sequence[str] | None = None,
        against: Sequence[Any] = (),
        alone: bool = False,
    ) -> list[list[Explanation]]:
        """Explain several classes, or `texts`, of a batch, which is prepared once, with the arguments of `explain`.

        Args:
            pixels: what the model sees of the `photos`, (B, C, H, W).
            wanted: for each list of explanations, the index of a class, or of one of the `texts`, in each image; `None`
                for that with the highest score, of classes other than `against`.
            against: indices of classes, or texts.
            alone: whether to keep what was prepared of a single image, so that further classes cost no pass.
        """

        def prepare(images: Tensor) -> Any:
            images = images.to(self.target.mean.device)
            if texts is None:
                return PreparedClasses(self.explainer, self.target, images)
            return PreparedTexts(self.explainer, self.text_head, images)

        names = [photo.name for photo in photos]
        columns = []
        with self.computing():
            prepared = prepare(pixels)
            scores = prepared.scores() if texts is None else prepared.scores(texts)
            check_scores(scores, names, "logits" if texts is None else "similarities", self.target.name)
            excluded = torch.tensor([] if texts is not None else list(against), dtype=torch.long)
            best = scores.index_fill(-1, excluded, -torch.inf).argmax(-1).tolist()
            for column in wanted:
                indices = [own if index is None else index for index, own in zip(column, best, strict=True)]
                heatmaps = prepared.heatmaps(indices if texts is None else [texts[index] for index in indices], against)
                columns.append((indices, heatmaps))
        prepared_of = (lambda _: prepared) if alone else prepare
        own_pixels = [each.clone() for each in pixels]  # a view would keep its batch
        found = []
        for indices, heatmaps in columns:
            check_heatmaps(heatmaps, names, self.method)
            rows = zip(photos, own_pixels, scores, indices, heatmaps, strict=True)
            found.append([self._explanation(*row, prepared_of, top, texts, against) for row in rows])
        return found

    def _explanation(
        self,
        photo: Photo,
        image: Tensor,
        scores: Tensor,
        index: int,
        heatmap: Tensor,
        prepared_of: Callable[[Tensor], Any],
        top: int,
        texts: Sequence[str] | None,
        against: Sequence[Any],
    ) -> Explanation:
        """One explanation, whose image is prepared again for later questions."""

        def compute_heatmap(index: int, text: str, against: Sequence[Any]) -> Tensor:
            with self.computing():
                heatmaps = prepared_of(image[None]).heatmaps([index if texts is None else text], against)
            check_heatmaps(heatmaps, [photo.name], self.method)
            return heatmaps[0]

        def compute_score(text: str) -> Tensor:
            with self.computing():
                return prepared_of(image[None]).scores([text])[0]

        return Explanation(
            self.pixels.draw_seen(image),
            photo.name,
            scores.clone(),
            self.names if texts is None else texts,
            index,
            heatmap.clone(),
            self.method,
            self.target.name,
            top if texts is None else len(texts),
            compute_heatmap,
            file=photo.file,
            photo=lambda: self.pixels.draw(photo.decode(self.pixels)),
            box=photo.box,
            against=tuple(against),
            signed=is_signed(self.explainer, against),
            quantity=self.quantity(texts is not None),
            score_of=None if texts is None else compute_score,
        )
