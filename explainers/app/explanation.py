"""What `explainers.explain` returns: an image, its classes, and the heatmap of one of them."""

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from explainers.errors import InputError
from explainers.saved.files import atomic
from explainers.target.names import class_index

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PDF")
"""Kinds of files in which pictures are saved."""


@dataclass(frozen=True)
class ExplainedClass:
    """A class of the model: its index, its readable name, and its probability in an image."""

    index: int
    name: str
    probability: float


@dataclass(frozen=True, repr=False, eq=False)
class Explanation:
    """The heatmap of one class of one image.

    Args:
        image: what the model sees, uint8 (3, S, S).
        name: name of the image's file, or its number.
        probabilities: of all classes, (K,).
        names: readable names of all classes.
        index: the class of the heatmap.
        heatmap: (P, P); higher is more important.
        method: what computed the heatmap.
        model: name of the explained model.
        top: number of `classes`.
        heatmap_of: computes the heatmap (P, P) of another class, from its index.
        file: the image's file, if it has one; `save` never replaces it.
    """

    image: Tensor
    name: str
    probabilities: Tensor
    names: Sequence[str]
    index: int
    heatmap: Tensor
    method: str
    model: str
    top: int
    heatmap_of: Callable[[int], Tensor]
    file: Path | None = None

    @property
    def explained(self) -> ExplainedClass:
        """The class of the heatmap."""
        return self._class(self.index)

    @property
    def classes(self) -> list[ExplainedClass]:
        """The most probable classes, the first one first."""
        most = self.probabilities.topk(min(self.top, len(self.names)))
        return [self._class(index) for index in most.indices.tolist()]

    def of(self, wanted: int | str) -> "Explanation":
        """Explain another class of the same image, by its name or index.

        Explainers that predict all classes at once, such as AnyHead, need no further pass.

        Raises:
            InputError: if there is no such class; the message names similar ones.
        """
        index = class_index(wanted, self.names)
        return replace(self, index=index, heatmap=self.heatmap_of(index))

    def picture(
        self, opacity: float = 0.8, smooth: bool = False, size: int | None = None, legend: bool = True
    ) -> Image.Image:
        """Draw the heatmap over the grey image, with class, probability and legend, see `overlays.annotated`."""
        from explainers.report.overlays import annotated  # so that an explanation does not load what draws

        explained = self.explained
        title = f"{explained.name} {explained.probability:.2f}"
        return annotated(self.image, self.heatmap, title, opacity=opacity, smooth=smooth, size=size, legend=legend)

    def show(self) -> None:
        """Show the picture in the program that the system has for images."""
        self.picture().show()

    def save(self, path: str | Path, **drawing: Any) -> Path:
        """Write the picture to an image file, whole or not at all. Missing folders are made.

        Args:
            path: the file, whose ending chooses the format, such as `.png`.
            drawing: arguments of `picture`.

        Raises:
            InputError: for an ending that Pillow does not write, or for the image's own file.
        """
        path = Path(path).expanduser()
        if self.file is not None and path.resolve() == self.file.resolve():
            raise InputError(f"expected another file than the image itself, got {path.name}: rename it")
        if Image.registered_extensions().get(path.suffix.lower()) not in FORMATS:
            endings = ", ".join(sorted(end for end, kind in Image.registered_extensions().items() if kind in FORMATS))
            raise InputError(f"expected a file that ends in one of {endings}, got {path.name}")
        picture = self.picture(**drawing)
        with atomic(path) as unfinished:
            picture.save(unfinished)
        return path

    def __repr__(self) -> str:
        explained = self.explained
        return f"Explanation of {self.name}: {explained.name} {explained.probability:.2f}, by {self.method}"

    def _repr_html_(self) -> str:
        """The picture and a table of the classes, for notebooks."""
        file = io.BytesIO()
        self.picture().save(file, "png")
        picture = base64.b64encode(file.getvalue()).decode()
        rows = "".join(
            f"<tr><td>{html.escape(each.name)}</td><td>{each.probability:.3f}</td></tr>" for each in self.classes
        )
        caption = html.escape(f"{self.name}: {self.model}, explained by {self.method}")
        return (
            f'<div><img alt="{html.escape(repr(self))}" src="data:image/png;base64,{picture}">'
            f"<table><caption>{caption}</caption><tr><th>class</th><th>probability</th></tr>{rows}</table></div>"
        )

    def _class(self, index: int) -> ExplainedClass:
        return ExplainedClass(index, self.names[index], self.probabilities[index].item())
