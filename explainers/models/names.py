"""Names of classes that people can read, and the class that has a name."""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import timm.data

from explainers.errors import InputError
from explainers.saved.files import printable


def class_names(target: Any, of_data: Sequence[str] = ()) -> list[str]:
    """Readable names of all classes of a model, in the order of its logits.

    Args:
        target: the explained model; a head that was trained here knows the names of its classes.
        of_data: names of the classes in a data set, used if they are as many.

    Returns:
        See `readable_names`. A classifier of ImageNet has timm's names; unknown classes are called `class 0`.
    """
    count = target.num_classes
    names = list(target.classes or (of_data if len(of_data) == count else ()))
    if not names:
        subset = timm.data.infer_imagenet_subset(target.backbone)
        known = timm.data.ImageNetInfo(subset).label_names() if subset else []
        names = known if len(known) == count else [f"class {number}" for number in range(count)]
    return readable_names(names)


def readable_names(classes: Sequence[str]) -> list[str]:
    """Names of classes as people read them: WordNet's for its numbers (wnids), spaces for underscores.

    A name of WordNet that several classes have is followed by its definition, such as those of the two cranes. Names
    may be those of folders or files from elsewhere, so characters that are not `printable` are replaced.

    >>> readable_names(["n01440764", "polar_bear", "n99999999"])
    ['tench', 'polar bear', 'n99999999']
    """
    names = [_describe(name).split(", ")[0] if _wnid(name) else printable(name.replace("_", " ")) for name in classes]
    count = Counter(name.lower() for name in names)
    return [
        _describe(original, detailed=True) if count[name.lower()] > 1 and _wnid(original) else name
        for original, name in zip(classes, names, strict=True)
    ]


def _wnid(name: str) -> bool:
    return re.fullmatch(r"n\d{8}", name) is not None


def _describe(wnid: str, detailed: bool = False) -> str:
    """What WordNet calls a wnid: its names, and with `detailed` its definition; an unknown one stays as it is."""
    try:
        return _wordnet().label_name_to_description(wnid, detailed)
    except KeyError:
        return wnid


@cache
def _wordnet() -> timm.data.ImageNetInfo:
    return timm.data.ImageNetInfo()


def class_index(wanted: int | str, names: Sequence[str], setting: str = "classes") -> int:
    """Find a class by its name, in capital or small letters, or by its index.

    Args:
        wanted: name or index.
        names: the name of each class of the model.
        setting: name of the argument that `wanted` comes from, for messages.

    Raises:
        InputError: if the class does not exist, with the names that have it as a word, or otherwise are most like it.

    >>> class_index("Polar_bear", ["zebra", "polar bear"])
    1
    >>> class_index("bear", ["beaver", "bearskin", "polar bear"])
    Traceback (most recent call last):
    explainers.errors.InputError: expected classes among the 3 classes of the model, got bear: did you mean polar bear?
    """
    if isinstance(wanted, bool) or not isinstance(wanted, int | str):
        raise InputError(f"expected {setting} as names or indices of classes, got {wanted!r}")
    if isinstance(wanted, int):
        if 0 <= wanted < len(names):
            return wanted
        raise InputError(f"expected {setting} from 0 to {len(names) - 1}, or names of classes, got {wanted}")
    by_name = {name.lower(): index for index, name in enumerate(names)}
    plain = wanted.strip().lower()
    for spelling in (plain, plain.replace("_", " ")):
        if spelling in by_name:
            return by_name[spelling]
    containing = [name for name in by_name if plain and plain in name]
    as_words = [name for name in containing if re.search(rf"\b{re.escape(plain)}\b", name)]
    close = as_words or list(dict.fromkeys([*difflib.get_close_matches(plain, by_name, 3), *containing]))
    hint = f"did you mean {', '.join(names[by_name[name]] for name in close[:5])}?" if close else "name it by its index"
    raise InputError(f"expected {setting} among the {len(names)} classes of the model, got {wanted}: {hint}")
