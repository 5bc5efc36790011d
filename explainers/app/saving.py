"""Pictures of explanations in files and notebooks."""

import base64
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from explainers.errors import InputError
from explainers.saved.files import atomic, file_name

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PDF")
"""Kinds of files in which pictures are saved."""


def picture_name(image: str, method: str, explained: str | None = None) -> str:
    """The name of a picture's file: each method and each class has its own.

    Args:
        image: name of the image, whose ending is left out.
        method: what computed the heatmap.
        explained: the class or text; `None` to leave it out.

    >>> picture_name("photo.jpg", "GAE"), picture_name("photo.jpg", "GAE", "tiger cat")
    ('photo_GAE.png', 'photo_GAE_tiger_cat.png')
    """
    parts = [Path(image).stem, method, *([] if explained is None else [explained])]
    return f"{file_name('_'.join(parts).replace(' ', '_'))}.png"


def save_picture(
    draw: Callable[[], Image.Image], path: str | Path, name: str, explained: Sequence[Path | None]
) -> Path:
    """Write a picture to an image file, whole or not at all. Missing folders are made.

    Args:
        draw: draws the picture, once the path is known to be good.
        path: the file, whose ending chooses the format, such as `.png`; or a folder.
        name: the file's name in a folder.
        explained: files of the explained images, which are never replaced; `None` for images without a file.

    Raises:
        InputError: for an ending that Pillow does not write, or for the file of an explained image.
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


def data_url(image: Image.Image, kind: str = "png", **options: object) -> str:
    """An image as a URL that holds its bytes."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
