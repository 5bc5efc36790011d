"""What `explainers.explain` returns: an image, its classes or texts, and the heatmap of one of them."""

import html
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.images.transform import Box
from explainers.models.names import class_index, find_other_classes
from explainers.report.html_pages import data_url
from explainers.saved.files import atomic, file_name

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PDF")
"""Kinds of files in which pictures are saved."""


@dataclass(frozen=True)
class ExplainedClass:
    """A class of the model, or a text: its index, its readable name, and its score in an image."""

    index: int
    name: str
    score: float


@dataclass(frozen=True, repr=False, eq=False)
class Explanation:
    """The heatmap of one class, or of one text, of one image.

    Args:
        image: what the model sees, uint8 (3, H, W); of a model of other channels, three of them, or grey.
        name: name of the image's file, or its number.
        scores: of all classes or texts, (K,).
        names: readable names of all classes; or the texts.
        index: the class of the heatmap, or the number of its text.
        heatmap: (rows, columns); higher is more important.
        method: what computed the heatmap.
        model: name of the explained model.
        top: number of `classes`.
        heatmap_of: computes the heatmap of another class, from its index, its name and `against`.
        file: the image's file, if it has one; `save` never replaces it.
        quantity: what the scores are: `probability`, or `value` of a regression; for texts `similarity`, the cosine, or
            `score`.
        against: indices of the classes, or the texts, from which the class or text is told apart.
        score_of: scores further texts, (1,) each; `None` for classes.
        photo: reads the whole photo, upright RGB; `None` in an explanation from a file.
        box: where in the photo `image` is: left, top, right and bottom in pixels of the photo.
        signed: whether values below 0 oppose what is explained; `None` if the explainer does not say so, see `overlay`.
    """

    image: Tensor
    name: str
    scores: Tensor
    names: Sequence[str]
    index: int
    heatmap: Tensor
    method: str
    model: str
    top: int
    heatmap_of: Callable[[int, str, Sequence[Any]], Tensor]
    file: Path | None = None
    quantity: str = "probability"
    against: tuple[int | str, ...] = ()
    score_of: Callable[[str], Tensor] | None = None
    photo: Callable[[], Image.Image] | None = None
    box: Box | None = None
    signed: bool | None = None

    @property
    def explained(self) -> ExplainedClass:
        """The class or text of the heatmap."""
        return self._class(self.index)

    @property
    def classes(self) -> list[ExplainedClass]:
        """The classes with the highest scores, or all texts, the highest score first."""
        most = self.scores.topk(min(self.top, len(self.names)))
        return [self._class(index) for index in most.indices.tolist()]

    @property
    def title(self) -> str:
        """The class or text of the heatmap, with its score."""
        return f"{self.write(self.explained)}{summarise(self._others, self.kind)}"

    def write(self, each: ExplainedClass) -> str:
        """The name of a class or text with its score: two decimal places, or four digits of a value."""
        return f"{each.name} {write_score(each.score, self.quantity)}"

    @property
    def _others(self) -> list[str]:
        """The names of the classes, or the texts, from which the explained one is told apart."""
        return [self.names[each] if isinstance(each, int) else each for each in self.against]

    def of(self, wanted: int | str, against: int | str | Sequence[int | str] | None = None) -> "Explanation":
        """Explain another class of the same image, by its name or index; or any other text, if texts are explained.

        Explainers that predict all classes at once, such as AnyHead, need no further pass.

        Args:
            wanted: the class, or text.
            against: other classes, or texts, see `explain`; `None` for those of this explanation.

        Raises:
            InputError: if there is no such class; the message names similar ones.
        """
        if self.score_of is not None and isinstance(wanted, str) and wanted not in self.names:
            scores = torch.cat([self.scores, self.score_of(wanted)])
            return replace(self, names=[*self.names, wanted], scores=scores, top=self.top + 1).of(wanted, against)
        index, listed = class_index(wanted, self.names), self.against if against is None else against
        if self.score_of is None:
            others: tuple[int | str, ...] = tuple(find_other_classes(listed, [index], self.names))
        else:
            others = (listed,) if isinstance(listed, int | str) else tuple(listed)
        if (index, others) == (self.index, self.against):
            return self
        heatmap = self.heatmap_of(index, self.names[index], others)
        return replace(self, index=index, heatmap=heatmap, against=others)

    def on_photo(self, size: int = 1024, smooth: bool = True) -> Image.Image:
        """Draw the heatmap over the whole photo, without words; grey is what the model does not see.

        An explanation from a file has no photo, and draws what the model sees.

        Args:
            size: longer side in pixels, from 192 to 8192.
            smooth: colours without edges; otherwise each patch has its own.
        """
        from explainers.report.overlays import draw_on_photo  # so that an explanation does not load what draws

        return draw_on_photo(*self._drawn, size=size, smooth=smooth, signed=self.signed)

    def picture(self, size: int = 640, smooth: bool = True) -> Image.Image:
        """Draw the photo and the heatmap over it, with class, score, method and legend; arguments as of `on_photo`."""
        from explainers.report.overlays import draw_annotated

        photo, heatmap, box = self._drawn
        against = self._others[0] if len(self.against) == 1 else ""
        words = self.title, self.explained.name, self.method
        return draw_annotated(photo, heatmap, *words, box, size, smooth, self.signed, against)

    def at_pixels(self) -> Tensor:
        """The heatmap at the photo's own pixels, (H, W): each has the value of its patch.

        It is NaN where the model does not see the photo; matplotlib leaves that blank. An explanation from a file has
        no photo, and gives the pixels of `image`.
        """
        photo, heatmap, box = self._drawn
        left, top, right, bottom = box or (0, 0, *photo.size)

        def find_patches(pixels: int, start: float, end: float, count: int) -> Tensor:
            places = (torch.arange(pixels, dtype=torch.double) + 0.5 - start) / (end - start) * count
            return places.floor().clamp(-1, count).long() + 1

        framed = F.pad(heatmap.float(), (1, 1, 1, 1), value=torch.nan)  # what lies outside
        rows = find_patches(photo.height, top, bottom, heatmap.shape[0])
        return framed[rows][:, find_patches(photo.width, left, right, heatmap.shape[1])]

    @property
    def _drawn(self) -> tuple[Image.Image, Tensor, Box | None]:
        """What pictures show: the photo, the heatmap, and where in the photo it is."""
        from explainers.report.overlays import to_pillow

        if self.photo is None:
            return to_pillow(self.image), self.heatmap, None
        return self.photo(), self.heatmap, self.box

    @property
    def kind(self) -> str:
        """What is explained: a `class` or a `text`."""
        return "class" if self.score_of is None else "text"

    def show(self) -> None:
        """Show the picture in the program that the system has for images."""
        self.picture().show()

    def save(self, path: str | Path = ".", **drawing: Any) -> Path:
        """Write the picture, drawn with the arguments of `picture`, to an image file, and return its path.

        The ending of the path, such as `.png`, chooses the format; in a folder, the file is named after the image, the
        method and the class.
        """
        name = picture_name(self.name, self.method, f"{self.explained.name}{summarise(self._others, self.kind)}")
        return save_picture(lambda: self.picture(**drawing), path, name, [self.file])

    def __repr__(self) -> str:
        return f"Explanation of {self.name}: {self.title}, by {self.method}"

    def _repr_html_(self) -> str:
        """The picture and a table of the classes or texts, for notebooks."""
        rows = "".join(f"<tr><td>{html.escape(each.name)}</td><td>{each.score:.3f}</td></tr>" for each in self.classes)
        caption = html.escape(f"{self.name}: {self.model}, explained by {self.method}")
        return (
            f'<div><img alt="{html.escape(repr(self))}" src="{data_url(self.picture())}"><table><caption>{caption}'
            f"</caption><tr><th>{self.kind}</th><th>{self.quantity}</th></tr>{rows}</table></div>"
        )

    def __copy__(self) -> "Explanation":
        return replace(self)  # with the model, unlike what a file holds

    def __deepcopy__(self, memo: dict[int, Any]) -> "Explanation":
        """Copy the tensors; the model is shared."""
        return replace(self, image=self.image.clone(), scores=self.scores.clone(), heatmap=self.heatmap.clone())

    def __getstate__(self) -> dict[str, Any]:
        """What a file holds: everything but the model, without which `of` explains nothing further."""
        score_of = None if self.score_of is None else _without_model
        return vars(self) | {"heatmap_of": _without_model, "score_of": score_of, "photo": None}

    def _class(self, index: int) -> ExplainedClass:
        return ExplainedClass(index, self.names[index], self.scores[index].item())


def write_score(score: float, quantity: str) -> str:
    """A score with two decimal places; a `value` with four digits.

    >>> write_score(0.254, "probability"), write_score(37.512, "value")
    ('0.25', '37.51')
    """
    return f"{score:{'.4g' if quantity == 'value' else '.2f'}}"


def summarise(against: Sequence[str], kind: str) -> str:
    """What a class or text is told apart from, for the end of a title.

    >>> summarise(["a dog"], "text"), summarise(["tabby", "lynx"], "class"), summarise([], "class")
    (' rather than a dog', ' rather than 2 other classes', '')
    """
    if len(against) > 1:
        return f" rather than {len(against)} other {'classes' if kind == 'class' else 'texts'}"
    return f" rather than {against[0]}" if against else ""


def _without_model(*arguments: Any) -> Tensor:
    raise InputError("of(...) of an explanation from a file has no model: explain the image again")


def picture_name(image: str, method: str, explained: str | None = None) -> str:
    """The name of a picture's file: each method, and each class or text, has its own.

    >>> picture_name("photo.jpg", "GAE"), picture_name("photo.jpg", "GAE", "tiger cat")
    ('photo_GAE.png', 'photo_GAE_tiger_cat.png')
    """
    parts = [Path(image).stem, method, *([] if explained is None else [explained])]
    return f"{file_name('_'.join(parts).replace(' ', '_'))}.png"


def save_picture(
    draw: Callable[[], Image.Image], path: str | Path, name: str, explained: Sequence[Path | None]
) -> Path:
    """Write a picture, which is drawn once the path is known to be good, to a file, whole or not at all.

    In a folder it gets the `name`; missing folders are made. An InputError is raised for an ending that Pillow does not
    write, and for the file of one of the images that are `explained`.
    """
    path = Path(os.path.expanduser(path))
    path = path / name if path.is_dir() else path
    if os.path.realpath(path) in [os.path.realpath(file) for file in explained if file is not None]:
        raise InputError(f"expected another file than the image itself, got {path.name}: rename it")
    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind not in FORMATS:
        endings = ", ".join(sorted(end for end, kind in Image.registered_extensions().items() if kind in FORMATS))
        raise InputError(f"expected a file that ends in one of {endings}, got {path.name}")
    encoded = io.BytesIO()  # because Pillow's encoders do not say that a disk is full
    draw().save(encoded, kind)
    with atomic(path) as unfinished:
        unfinished.write_bytes(encoded.getvalue())
    return path
