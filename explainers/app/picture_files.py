"""Which images `explainers explain` reads, and which files it writes: never over an image that is explained."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from explainers.app.explanation import picture_name
from explainers.app.photos import photos_of
from explainers.errors import InputError
from explainers.images.listing import endings, list_images


@dataclass(frozen=True)
class Picture:
    """A picture to write.

    Args:
        image: file of the image.
        name: its name for the user.
        method: label of what explains it.
        explained: the class, or text; `None` for the predicted class.
        file: where the picture is written.
    """

    image: Path
    name: str
    method: str
    explained: str | None
    file: Path


def found_images(images: Sequence[str], pictures: int, output: Path) -> dict[Path, Path]:
    """Find the images, and check that their pictures can be written, before anything is computed.

    Args:
        images: files and folders.
        pictures: number of pictures of each image.
        output: a folder; or a file, for a single picture.

    Returns:
        Each image file → its name below its folder.

    Raises:
        InputError: for images that do not exist, a file for several pictures, and where a picture would replace an
            image.
    """
    single = names_file(output)
    folder = output.parent if single else output
    found = dict(files_of(images, folder))
    count = len(found) * pictures
    if single and count > 1:
        raise InputError(f"expected a folder for {count} pictures, got --output {output}: leave out {output.suffix}")
    if single and real(output) in found:
        raise InputError(f"expected another file than the image itself, got --output {output}: rename it")
    check_writable(folder)
    return found


def planned(
    found: Mapping[Path, Path], methods: Sequence[str], explained: Sequence[str | None], output: Path
) -> list[Picture]:
    """Plan the picture of each image, method, and class or text; its name says them, unless the output is a file.

    Args:
        found: see `found_images`.
        methods: labels of what computes the heatmaps.
        explained: the classes or texts to explain in each image; `None` for the predicted class.
        output: a folder, or a file.
    """
    pictures: list[Picture] = []
    taken = set(found)
    for image, name in found.items():
        for method, each in product(methods, explained):
            file = output
            if not names_file(output):
                file = unused(output / name.parent / picture_name(name.name, method, each), taken)
            taken.add(real(file))
            pictures.append(Picture(image, name.as_posix(), method, each, file))
    return pictures


def names_file(output: Path) -> bool:
    """Whether an output is a file for one picture, not a folder."""
    return output.suffix.lower() in endings() and not output.is_dir()


def files_of(images: Sequence[str], output: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each image file, and its name below its folder; without pictures that were written to `output` before."""
    for given in images:
        folder = Path(os.path.expanduser(given))
        if not folder.is_dir():
            photos_of(given)  # says what is wrong with it
            yield real(folder), Path(folder.name)
            continue
        (files,) = list_images([folder])
        own = [] if real(folder).is_relative_to(real(output)) else [real(output)]
        kept = [file for file in files if not any(real(file).is_relative_to(each) for each in own)]
        if not kept:
            raise InputError(f"expected images below {folder}, got none: give another folder")
        yield from ((real(file), file.relative_to(folder)) for file in kept)


def real(file: Path) -> Path:
    """The path without links; `Path.resolve` raises an error for a loop of links."""
    return Path(os.path.realpath(file))


def unused(file: Path, taken: set[Path]) -> Path:
    """The file, or with a number if another picture, or an image, has its name."""
    numbered, number = file, 1
    while real(numbered) in taken:
        number += 1
        numbered = file.with_name(f"{file.stem}_{number}{file.suffix}")
    return numbered


def check_writable(folder: Path) -> None:
    """Create a folder, and raise an InputError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"expected a folder for pictures, got {folder}: {error.strerror}; give --output") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"expected a folder that can be written to, got {folder}: give another --output")
