"""Masks: which pixels of an image are its object."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from explainers.errors import InputError
from explainers.images.bands import ARRAYS, read_array
from explainers.images.decoding import decode, turn_upright

VOID = 255
"""Index that indexed masks, such as those of PASCAL VOC, have where it is open what a pixel shows."""

WHOLE = frozenset({"1", "L", "I", "I;16", "I;16L", "I;16B", "I;16N", "F"})
"""Modes of one number for each pixel."""

MaskValue = int | str | Sequence[int | str] | None
"""Values of the object in masks: numbers, and ranges such as 128-255; `None` for the only one beside 0."""

Ranges = Sequence[tuple[int, int]]
"""Lowest and highest value, both included."""


def find_ranges(given: MaskValue) -> Ranges:
    """Find the ranges of values that `mask_value` names; none for `None`.

    >>> find_ranges([1, "128-255"])
    [(1, 1), (128, 255)]
    """
    each = given if isinstance(given, Sequence) and not isinstance(given, str) else [given] * (given is not None)
    found = [re.fullmatch(r"(\d+)(?:-(\d+))?", str(one)) for one in each]
    ranges = [(int(one[1]), int(one[2] or one[1])) for one in found if one]
    if len(ranges) < len(found) or any(low > high for low, high in ranges):
        raise InputError(f"mask_value={given!r}: expected numbers, or ranges such as 128-255", "mask_value")
    return ranges


def read_mask(path: Path, ranges: Ranges = ()) -> np.ndarray:
    """Read which pixels of an upright mask are the object: boolean (rows, columns).

    Values are those of `read_ids`; of grey pixels in colour files, the grey value; of files with some transparent
    pixels, the opacity. In an indexed file, 0 is the background, `VOID` open, and the object any other index, unless
    its colours are black and white. Other masks see `find_object`.

    Args:
        path: an image file, or an array (H, W).
        ranges: values of the object; none for the rules above.

    Raises:
        CorruptImage: if the file cannot be decoded.
        InputError: if it is open which values are the object.
    """
    if path.suffix.lower() in ARRAYS:
        return find_object(read_array(path), path, ranges)
    image = _load(path)
    if "A" in image.getbands() and len(set(image.getchannel("A").getextrema())) > 1:
        return find_object(np.asarray(image.getchannel("A")), path, ranges)
    if image.mode in WHOLE:
        return find_object(np.asarray(image), path, ranges)
    colours = np.asarray(image.convert("RGB"))
    is_grey = bool((colours == colours[..., :1]).all())
    if image.mode == "P" and (ranges or not is_grey or not np.isin(colours, (0, 255)).all()):
        return find_object(np.asarray(image), path, ranges or [(1, VOID - 1)])
    return find_object(colours[..., 0] if is_grey else _pack(colours), path, ranges)


def find_object(values: np.ndarray, name: object, ranges: Ranges = ()) -> np.ndarray:
    """Find the object in the values of a mask: those in `ranges`, or the only one beside 0.

    >>> find_object(np.array([[0, 7]]), "a.png").tolist()
    [[False, True]]
    >>> find_object(np.array([[1, 2, 3]]), "a.png", [(1, 1)]).tolist()
    [[True, False, False]]

    Raises:
        InputError: for several values beside 0, or two without 0, if no ranges say which is the object.
    """
    found = np.unique(values)
    if values.ndim != 2:
        raise InputError(f"{name}: expected a mask of rows and columns, got shape {list(values.shape)}")
    if not ranges and (len(found) > 2 or len(found) == 2 and found[0] != 0):
        listed = ", ".join(map(str, found)) if len(found) < 5 else f"{len(found)} from {found[0]} to {found[-1]}"
        advice = "give those of the object, such as mask_value=1, or mask_value=128-255 for all bright ones"
        wanted = "expected a mask of two values, 0 and that of the object"
        raise InputError(f"{name}: {wanted}, got {listed}: {advice}", "mask_value")
    if not ranges:
        return values != 0
    return np.logical_or.reduce([(values >= low) & (values <= high) for low, high in ranges])


def read_ids(path: Path) -> np.ndarray:
    """Read ids of classes, int32 (rows, columns): palette index, grey value, or R + 256 · G + 65536 · B.

    Raises:
        CorruptImage: if the file cannot be decoded.
    """
    image = _load(path)
    if image.mode == "P" or image.mode in WHOLE:
        return np.asarray(image).astype(np.int32)
    return _pack(np.asarray(image.convert("RGB")))


def _load(path: Path) -> Image.Image:
    image = decode(path)
    turn_upright(image)
    return image


def _pack(colours: np.ndarray) -> np.ndarray:
    """One number for each colour."""
    return colours.astype(np.int32) @ np.array([1, 256, 65536], dtype=np.int32)
