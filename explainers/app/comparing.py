"""Why two images are alike: `explainers.explain(image, model, similar_to=other)`."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from explainers.app.checking import check_scores
from explainers.app.photos import Photo, decoded, is_single, photos_of
from explainers.app.saving import data_url, picture_name, save_picture
from explainers.app.session import Session
from explainers.errors import InputError, check_positive
from explainers.likeness import Likeness, likeness

TIES = 5
"""Number of pairs of patches in a picture."""


class Tie(NamedTuple):
    """Two patches, by their numbers row by row, and what their pair adds to the similarity."""

    patch: int
    other: int
    value: float


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """Why an image is like another one.

    Args:
        image: what the model sees of the image, uint8 (3, S, S).
        other: what it sees of the other one, uint8 (3, S, S).
        name: name of the image's file, or its number.
        other_name: that of the other image.
        likeness: of this one pair of images.
        method: what computed the vectors of the patches.
        model: name of the model.
        files: the files of both images, if they have one; `save` never replaces them.
    """

    image: Tensor
    other: Tensor
    name: str
    other_name: str
    likeness: Likeness
    method: str
    model: str
    files: tuple[Path | None, Path | None] = (None, None)

    @property
    def similarity(self) -> float:
        """The cosine of the embeddings."""
        return self.likeness.similarity[0].item()

    @property
    def pairs(self) -> Tensor:
        """What each pair of patches adds to the similarity, (N, N): row z is patch z of the image."""
        return self.likeness.pairs[0]

    @property
    def heatmap(self) -> Tensor:
        """What makes the image like the other one, (P, P)."""
        return self.likeness.of_first[0]

    @property
    def other_heatmap(self) -> Tensor:
        """What makes the other one like the image, (P, P)."""
        return self.likeness.of_second[0]

    def ties(self, count: int = TIES) -> list[Tie]:
        """The pairs of patches that add most to the similarity, the strongest first; no two touch."""
        check_positive(count=count)
        strongest = self.likeness.strongest(count, apart=1)[0].tolist()
        return [Tie(patch, other, self.pairs[patch, other].item()) for patch, other in strongest]

    def picture(
        self,
        ties: int = TIES,
        opacity: float = 0.8,
        smooth: bool = False,
        size: int | None = None,
        legend: bool = True,
    ) -> Image.Image:
        """Draw both images with their heatmaps, and lines for the first `ties`, see `side_by_side`; 0 for none."""
        from explainers.report.side_by_side import side_by_side  # so that a comparison does not load what draws

        return side_by_side(
            (self.image, self.other),
            (self.heatmap, self.other_heatmap),
            [(tie.patch, tie.other) for tie in (self.ties(ties) if ties else [])],
            f"{self.name} and {self.other_name}, similarity {self.similarity:.2f}",
            opacity,
            smooth,
            size,
            legend,
            self.method,
        )

    def show(self) -> None:
        """Show the picture in the program that the system has for images."""
        self.picture().show()

    def save(self, path: str | Path = ".", **drawing: Any) -> Path:
        """Write the picture to an image file, whole or not at all, with the arguments of `Explanation.save`."""
        name = picture_name(self.name, self.method, f"like {Path(self.other_name).stem}")
        return save_picture(lambda: self.picture(**drawing), path, name, self.files)

    def __repr__(self) -> str:
        return f"Comparison of {self.name} and {self.other_name}: similarity {self.similarity:.2f}, by {self.method}"

    def _repr_html_(self) -> str:
        """The picture, for notebooks."""
        caption = html.escape(f"{self!r}, {self.model}")
        return f'<div><img alt="{html.escape(repr(self))}" src="{data_url(self.picture())}"><p>{caption}</p></div>'


def compared(session: Session, images: Any, similar_to: Any, centre: Tensor | None = None) -> Iterator[Comparison]:
    """Compare images with another one, one batch after the other, and yield a comparison of each.

    Args:
        session: the model, and an explainer with vectors, or one that is linear.
        images: see `photos_of`.
        similar_to: the other image.
        centre: what all images have in common, (D,), see `mean_embedding`; `None` for nothing.

    Raises:
        InputError: for images that cannot be read, several in `similar_to`, and explainers that are not linear.
    """
    other, square = one_image(session, similar_to, "similar_to")
    for photos, pixels, _ in session.batches(photos_of(images), "comparing"):
        yield from comparisons(session, photos, pixels, [other] * len(photos), square.expand_as(pixels), centre)


def one_image(session: Session, image: Any, setting: str) -> tuple[Photo, Tensor]:
    """The photo that a caller means, and its uint8 pixels (3, S, S) for the model; an InputError for several."""
    if not is_single(image):
        raise InputError(f"expected one image in {setting}, got several: give one after the other")
    (photo,) = photos_of(image)
    pixels = decoded(photo, session.target.grid.image_size, session.resampling)
    assert pixels is not None  # only files of folders are left out
    return photo, pixels


def comparisons(
    session: Session,
    photos: Sequence[Photo],
    pixels: Tensor,
    others: Sequence[Photo],
    other_pixels: Tensor,
    centre: Tensor | None = None,
) -> list[Comparison]:
    """Compare each photo of a batch, uint8 pixels (B, 3, S, S), with another one."""
    device = session.target.mean.device
    with session.computing():
        centre = None if centre is None else centre.to(device)
        found = likeness(session.explainer, pixels.to(device), other_pixels.to(device), centre)
    check_scores(found.similarity, [photo.name for photo in photos], "similarities", session.target.name)
    return [
        Comparison(
            pixels[row],
            other_pixels[row],
            photo.name,
            other.name,
            _of_row(found, row),
            session.method,
            session.target.name,
            (photo.file, other.file),
        )
        for row, (photo, other) in enumerate(zip(photos, others, strict=True))
    ]


def _of_row(found: Likeness, row: int) -> Likeness:
    """The likeness of one of several pairs of images, on the CPU."""
    one = slice(row, row + 1)
    parts = {name: getattr(found, name)[one].cpu() for name in ("similarity", "pairs", "rest")}
    return replace(found, **parts)


def mean_embedding(session: Session, images: Any) -> Tensor:
    """What images have in common: the mean (D,) of their embeddings; see `photos_of` for `images`."""
    return embedded(session, photos_of(images))[0].mean(0)


def embedded(session: Session, photos: list[Photo]) -> tuple[Tensor, list[int]]:
    """The embeddings (M, D) of the photos that can be decoded, and their numbers."""
    parts = []
    numbers: list[int] = []
    for batch, pixels, kept in session.batches(photos, "embedding"):
        parts.append(embed(session, pixels))
        check_scores(parts[-1], [photo.name for photo in batch], "embeddings", session.target.name)
        numbers += kept
    return torch.cat(parts), numbers


def embed(session: Session, pixels: Tensor) -> Tensor:
    """Embed uint8 pixels (B, 3, S, S): (B, D), on the CPU."""
    target = session.target
    with session.computing():
        return target.embed(target.normalise(pixels.to(target.mean.device))).float().cpu()
