"""Why two images are alike: `explainers.compare(image, other, model)`, and the nearest images of a folder."""

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from PIL import Image
from torch import Tensor, nn

from explainers.app.batches import check_scores
from explainers.app.choosing import Method, is_image_tower
from explainers.app.explanation import picture_name, save_picture
from explainers.app.photos import Images, OneImage, Photo, is_single, list_photos
from explainers.app.session import Session
from explainers.errors import InputError, check_positive
from explainers.likeness import Likeness, likeness_of_vectors, vectors_of
from explainers.likeness import nearest as nearest_embeddings
from explainers.models import TargetModel
from explainers.models.heads import NoHead
from explainers.report.html_pages import data_url

MANY = 20
"""From this number of images on, embeddings are compared relative to their mean."""

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
        image: what the model sees of the image, as pictures show it, uint8 (3, H, W).
        other: the same of the other image.
        name: name of the image's file, or its number.
        other_name: name of the other image.
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
        """What makes the image like the other one, (rows, columns)."""
        return self.likeness.of_first[0]

    @property
    def other_heatmap(self) -> Tensor:
        """What makes the other one like the image, (rows, columns)."""
        return self.likeness.of_second[0]

    def ties(self, count: int = TIES) -> list[Tie]:
        """The pairs of patches that add most to the similarity, the strongest first; no two touch."""
        check_positive(count=count)
        strongest = self.likeness.strongest(count, apart=1)[0].tolist()
        return [Tie(patch, other, self.pairs[patch, other].item()) for patch, other in strongest]

    def picture(self, ties: int = TIES, size: int = 640, smooth: bool = True) -> Image.Image:
        """Draw both images with their heatmaps, and lines for the first `ties`, see `side_by_side`; 0 for none."""
        from explainers.report.side_by_side import side_by_side  # so that a comparison does not load what draws

        images, heatmaps = (self.image, self.other), (self.heatmap, self.other_heatmap)
        pairs = [(tie.patch, tie.other) for tie in (self.ties(ties) if ties else [])]
        title = f"{self.name} and {self.other_name}, similarity {self.similarity:.2f}"
        return side_by_side(images, heatmaps, pairs, title, self.method, size, smooth)

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


@overload
def compare(  # type: ignore[overload-overlap]  # a text is a path, although it is iterable, too
    images: OneImage,
    other: OneImage,
    model: str | nn.Module,
    *,
    method: Method = "auto",
    against: Images | None = None,
) -> Comparison: ...


@overload
def compare(
    images: Iterable[OneImage],
    other: OneImage,
    model: str | nn.Module,
    *,
    method: Method = "auto",
    against: Images | None = None,
) -> list[Comparison]: ...


def compare(
    images: Images,
    other: OneImage,
    model: str | nn.Module,
    *,
    method: Method = "auto",
    against: Images | None = None,
) -> Comparison | list[Comparison]:
    """Explain why images are like another one: which of their patches match.

    Args:
        images: one image, or several, see `explain`.
        other: the image with which they are compared.
        model: see `explain`; a model without a head does, such as DINOv2.
        method: an explainer with vectors of patches, such as AnyHead, or a linear method, see `choose`.
        against: images, such as a folder, whose mean embedding is what all images have in common: the likeness is
            relative to it. `None` for nothing.

    Returns:
        A `Comparison`; a list of them for several images.

    Raises:
        InputError: for images that cannot be read, and for an explainer that is not linear.
    """
    session = Session(model, method, purpose="likeness")
    centre = None if against is None else mean_embedding(session, against)
    reference = embed_image(session, other, "other")
    comparisons: list[Comparison] = []
    for photos, pixels, _ in session.batches(list_photos(images), "comparing"):
        comparisons += compare_with(Embedded(session, photos, pixels), reference, centre)
    return comparisons[0] if is_single(images) else comparisons


def nearest(
    image: OneImage,
    folder: Images,
    model: str | nn.Module,
    k: int = 5,
    *,
    method: Method = "auto",
) -> list[Comparison]:
    """Find the images of a folder that are most like an image, and explain why.

    In a folder of 20 images or more, embeddings are compared relative to their mean, which all images have in common:
    otherwise, the likeness to any image lies on the same patches.
    `model` and `method` are those of `compare`.

    Args:
        image: one image, see `explain`.
        folder: the images to choose from: a folder, or what `explain` takes else. The image itself is left out.
        k: number of images.

    Returns:
        Comparisons of the image with the k nearest ones, the most similar first; fewer if the folder has fewer.
    """
    return list(stream_nearest(Session(model, method, purpose="likeness"), image, folder, k))


def stream_nearest(session: Session, image: OneImage, folder: Images, k: int) -> Iterator[Comparison]:
    """Compare an image with the k most similar ones of a folder, one batch after the other, see `nearest`."""
    check_positive(k=k)
    own = embed_image(session, image, "image")
    file = own.photos[0].file and own.photos[0].file.resolve()
    photos = [each for each in list_photos(folder) if each.file is None or each.file.resolve() != file]
    if not photos:
        raise InputError(
            f"expected other images than the image itself, got {own.photos[0].name} alone: give another folder"
        )
    embeddings, numbers = _embeddings(session, photos)
    centre = embeddings.mean(0) if len(embeddings) >= MANY else None
    found = nearest_embeddings(embeddings, _embed(session, own.pixels), k, centre)[1][0]
    for part in found.split(session.batch_size):
        batch = [photos[numbers[place]] for place in part.tolist()]
        yield from compare_with(own, Embedded(session, *session.decode(batch)), centre)


class Embedded:
    """Photos, what the model sees of them, (B, C, H, W), and the vectors of their patches."""

    def __init__(self, session: Session, photos: Sequence[Photo], pixels: Tensor) -> None:
        self.session = session
        self.photos = photos
        self.pixels = pixels
        with session.computing():
            images = pixels.to(session.target.mean.device)
            self.vectors = vectors_of(session.explainer, images, layers=_find_layers(session.target))


def compare_with(first: Embedded, second: Embedded, centre: Tensor | None) -> list[Comparison]:
    """Compare photos with other ones, pair by pair; a single one with all others."""
    session = first.session
    with session.computing():
        found = likeness_of_vectors(first.vectors, second.vectors, session.target.grid.shape, centre)
    count = len(found.similarity)
    ones, others = (
        [(each.photos[row], each.pixels[row]) for row in (range(count) if len(each.photos) == count else [0] * count)]
        for each in (first, second)
    )
    check_scores(found.similarity, [photo.name for photo, _ in ones], "similarities", session.target.name)
    return [
        Comparison(
            session.pixels.draw_seen(pixels).clone(),  # a view would keep its batch
            session.pixels.draw_seen(other_pixels).clone(),
            photo.name,
            other.name,
            found.take_row(row),
            session.method,
            session.target.name,
            (photo.file, other.file),
        )
        for row, ((photo, pixels), (other, other_pixels)) in enumerate(zip(ones, others, strict=True))
    ]


def mean_embedding(session: Session, images: Images) -> Tensor:
    """What images have in common: the mean (D,) of their embeddings; see `list_photos` for `images`."""
    return _embeddings(session, list_photos(images))[0].mean(0)


def embed_image(session: Session, image: OneImage, setting: str) -> Embedded:
    """The photo that a caller means; an InputError that names the setting for several."""
    if not is_single(image):
        raise InputError(f"{setting}: expected one image, got several: give one after the other", setting)
    return Embedded(session, *session.decode(list_photos(image)))


def _embeddings(session: Session, photos: list[Photo]) -> tuple[Tensor, list[int]]:
    """The embeddings (M, D) of the photos that can be decoded, and their numbers."""
    parts = []
    numbers: list[int] = []
    for batch, pixels, kept in session.batches(photos, "embedding"):
        parts.append(_embed(session, pixels))
        check_scores(parts[-1], [photo.name for photo in batch], "embeddings", session.target.name)
        numbers += kept
    return torch.cat(parts), numbers


def _embed(session: Session, pixels: Tensor) -> Tensor:
    """Embed pixels, uint8 or uint16 (B, C, H, W): (B, D), on the CPU."""
    target = session.target
    with session.computing():
        embeddings = target.embed(target.normalise(pixels.to(target.mean.device))).float()
        return _find_layers(target)(embeddings).cpu()


def _find_layers(target: TargetModel) -> nn.Module:
    """What a model that embeds images computes of G(x), such as CLIP's projection; the identity for a classifier."""
    if isinstance(target.head, NoHead):
        return target.head.layers
    return target.head if is_image_tower(target) else nn.Identity()
