"""The images of a folder that are most like an image, and why: `explainers.nearest("photo.jpg", "photos/", model)`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from explainers.app.comparing import Comparison, comparisons, embed, embedded, one_image
from explainers.app.photos import Photo, decoded, photos_of
from explainers.app.session import Session
from explainers.errors import InputError, check_integers, check_positive
from explainers.likeness import nearest as nearest_embeddings

MANY = 20
"""From this number of images on, embeddings are compared relative to their mean."""


def nearest(
    image: Any,
    folder: Any,
    model: Any,
    k: int = 5,
    *,
    method: Any = "auto",
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
) -> list[Comparison]:
    """Find the images of a folder that are most like an image, and explain why.

    In a folder of 20 images or more, embeddings are compared relative to their mean, which all images have in common:
    otherwise, the likeness to any image lies on the same patches.

    Args:
        image: one image, see `explain`.
        folder: the images to choose from: a folder, or what `explain` takes else. The image itself is left out.
        model: see `explain`; a model without a head does, such as DINOv2.
        k: number of images.
        method: an explainer with vectors of patches, such as AnyHead, or a linear method, see `choose`.
        weights: see `explain`.
        device: see `explain`.

    Returns:
        Comparisons of the image with the k nearest ones, the most similar first; fewer if the folder has fewer.
    """
    return list(neighbours(Session(model, method, weights, device, purpose="likeness"), image, folder, k))


def neighbours(session: Session, image: Any, folder: Any, k: int = 5) -> Iterator[Comparison]:
    """Compare an image with the k most similar ones of a folder, the most similar first; see `nearest`.

    Raises:
        InputError: for images that cannot be read. Broken files of the folder are left out with a warning.
    """
    check_integers(k=k)
    check_positive(k=k)
    photo, square = one_image(session, image, "image")
    photos = [each for each in photos_of(folder) if photo.file is None or not _same(each, photo)]
    if not photos:
        raise InputError(f"expected other images than the image itself, got {photo.name} alone: give another folder")
    embeddings, numbers = embedded(session, photos)
    centre = embeddings.mean(0) if len(embeddings) >= MANY else None
    own = embed(session, square[None])
    chosen = [numbers[place] for place in nearest_embeddings(embeddings, own, k, centre)[1][0].tolist()]
    for start in range(0, len(chosen), session.batch_size):
        batch = [photos[number] for number in chosen[start : start + session.batch_size]]
        squares = [decoded(each, session.target.grid.image_size, session.resampling) for each in batch]
        pixels = torch.stack([square for square in squares if square is not None])
        yield from comparisons(session, [photo] * len(pixels), square.expand_as(pixels), batch, pixels, centre)


def _same(one: Photo, other: Photo) -> bool:
    """Whether two photos are the same file."""
    return one.file is not None and other.file is not None and one.file.resolve() == other.file.resolve()
