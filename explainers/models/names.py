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
    """The `readable_names` of all classes of a model, in the order of its logits.

    They are those of its head, or of a data set (`of_data`) of as many classes, or timm's for ImageNet; else `class 0`,
    and of a model of values `value 0`, or `value` for a single one.
    """
    count = target.num_classes
    if target.score == "value" and not target.classes:
        return ["value"] if count == 1 else [f"value {number}" for number in range(count)]
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
    names = [
        _describe(name).split(", ")[0] if _is_wnid(name) else printable(name.replace("_", " ")) for name in classes
    ]
    count = Counter(name.lower() for name in names)
    return [
        _describe(original, detailed=True) if count[name.lower()] > 1 and _is_wnid(original) else name
        for original, name in zip(classes, names, strict=True)
    ]


def list_names(classes: Sequence[str], count: int) -> list[str]:
    """The names of classes that a user gives, of which an InputError wants one for each of `count` classes."""
    if isinstance(classes, str) or len(classes) != count:
        given = repr(classes) if isinstance(classes, str) else f"{len(classes)}"
        raise InputError(
            f"expected a list of names of the model's {count} classes, got {given}: give one for each logit, in order"
        )
    return [str(name) for name in classes]


def _is_wnid(name: str) -> bool:
    return re.fullmatch(r"n\d{8}", name) is not None


def _describe(wnid: str, detailed: bool = False) -> str:
    """What WordNet calls a wnid: its names, and with `detailed` its definition; an unknown one stays as it is."""
    try:
        return _load_wordnet().label_name_to_description(wnid, detailed)
    except KeyError:
        return wnid


@cache
def _load_wordnet() -> timm.data.ImageNetInfo:
    return timm.data.ImageNetInfo()


def class_index(wanted: int | str, names: Sequence[str], setting: str = "classes") -> int:
    """Find a class by its name, in capital or small letters, or by its index.

    An InputError about `setting` for a class that does not exist names those that have it as a word, or are most alike.

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
