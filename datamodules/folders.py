"""Class folders in the layout of ImageNet: <root>/<split>/<class>/<file>."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from datamodules.datasets import ImageFiles, Reading, own_folder, select_part
from datamodules.images import Images, Loading
from explainers.errors import InputError
from explainers.images.listing import existing_folder, list_images
from explainers.images.transform import ImageTransform
from explainers.saved.files import printable


def image_folder(
    root: str | Path,
    transform: ImageTransform,
    half: int | None = None,
    held_out: bool | None = None,
    **reading: Unpack[Reading],
) -> ImageFiles:
    """Read labelled images, <root>/<class>/<file>.

    Every subfolder is a class, even an empty one, so that a part of the images has the same labels as the whole.
    Warnings name classes without images, and folders inside a class that may be classes themselves. For other arguments
    see `ImageFiles`.

    Args:
        root: folder of the class folders.
        half: 0 or 1 takes every second image, starting at that position, so that one folder gives two splits; `None`
            takes all images.
        held_out: see `select_part`.

    Raises:
        InputError: if the folder is missing or holds no image in a subfolder.
    """
    folder = existing_folder(root, "with one subfolder per class")
    subfolders = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    hidden, classes = ([name for name in subfolders if name.startswith(".") == wanted] for wanted in (True, False))
    images_of_classes = list_images([folder / name for name in classes], beside=[folder / name for name in hidden])
    files = [(path, label) for label, images in enumerate(images_of_classes) for path in images]
    if not files:
        raise InputError(
            f"expected {folder} to hold a subfolder of images per class, got {len(classes)} subfolders without images"
        )
    deeper = [path for path, _ in files if path.parent.parent != folder]
    if held_out is not None and deeper:
        raise InputError(
            f"expected {root} to hold train/ and val/, or a subfolder of images per class, got {deeper[0]}"
        )
    warn_of_classes(folder, classes, images_of_classes)
    files = list(select_part(files, held_out, root))
    files = files if half is None else files[half::2]
    if not files:
        raise InputError(
            f"expected two held-out images or more in {root}, for val and test, got one: add images, or set"
            " data.halve=false"
        )
    paths, labels = zip(*files, strict=True)
    return ImageFiles(paths, labels, transform, classes, **reading)


def warn_of_classes(folder: Path, classes: Sequence[str], images: Sequence[Sequence[Path]]) -> None:
    """Warn of classes without images, and of folders of different names inside classes, which may be meant as classes.

    Args:
        folder: the folder of the classes.
        classes: their names.
        images: the images of each.
    """
    empty = [name for name, paths in zip(classes, images, strict=True) if not paths]
    if empty:
        warnings.warn(f"{folder}: no images of {name_some(empty)} of {len(classes)} classes", stacklevel=3)
    inside = {path.relative_to(folder).parts[1:2] for paths in images for path in paths if path.parent.parent != folder}
    deeper = sorted("".join(parts) for parts in inside)
    if len(deeper) > 1:  # one name, such as images/, is a layout of its own
        warnings.warn(
            f"{folder}: the classes are its folders {name_some(classes)}; the folders {name_some(deeper)} inside them"
            " are none: move these up if they are meant",
            stacklevel=3,
        )


def name_some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are.

    >>> name_some(["cat", "dog"]), name_some(list("abcdef"))
    ('cat, dog', 'a, b, c, d and 2 more')
    """
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(printable, names[:4])) + more


def find_split_folder(root: str, splits: Mapping[str, str | None], split: str, **options: Any) -> ImageFiles:
    """Read the images of a split, from its own folder below `root` or from one that all splits share, see `own_folder`.

    The `options` are further arguments of `image_folder`.
    """
    own, train, val = (splits.get(name) for name in (split, "train", "val"))
    folder, held_out = own_folder(root, train, val, own) if own and train and val else (Path(root, own or ""), None)
    return image_folder(folder, held_out=held_out, **options)


class ImageFolders(Images):
    """Labelled images, <root>/<split>/<class>/<file>. Classes are numbered in the order of their sorted names.

    Of a folder without these splits, <root>/<class>/<file>, every tenth image by name is for validation and tests.
    For other arguments see `Images`.

    Args:
        root: folder that holds the splits.
        transform: how images become samples of H × W pixels.
        splits: split → its folder below `root`; a split whose folder is `None` or left out has no images.
        crop_fraction: see `datasets.choose_transform`.
        limit: split → maximum number of images, spread evenly over the classes; `None` takes all.
        halve: if `val` and `test` are the same folder, each takes every second image of it.
        skip_corrupt: warn of images that cannot be decoded, and replace them or leave them out, see `Images`;
            otherwise they are an error.
    """

    def __init__(
        self,
        root: str,
        transform: ImageTransform,
        splits: Mapping[str, str | None],
        crop_fraction: float | None = None,
        limit: Mapping[str, int | None] | None = None,
        halve: bool = False,
        skip_corrupt: bool = False,
        templates: Sequence[str] = (),
        **loading: Unpack[Loading],
    ) -> None:
        halves = {"val": 0, "test": 1} if halve and splits.get("val") == splits.get("test") else {}
        build = partial(find_split_folder, root, splits)
        options = {"transform": transform, "crop_fraction": crop_fraction, "skip_corrupt": skip_corrupt}
        train, val, test = (
            None
            if splits.get(split) is None
            else partial(build, split, limit=(limit or {}).get(split), half=halves.get(split), **options)
            for split in ("train", "val", "test")
        )
        super().__init__(train, val, test, templates, **loading)
