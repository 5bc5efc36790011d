"""Names of classes that people can read, and the class that has a name."""

import difflib
import json
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import timm.data

from explainers.errors import InputError
from explainers.saved.files import printable


def class_names(target: Any, of_data: Sequence[str] = ()) -> list[str]:
    """The `readable_names` of all classes of a model, in the order of its logits.

    They are those of its head, or of a data set (`of_data`) of as many classes, or timm's for the weights; else
    `class 0`, and of a model of values `value 0`, or `value` for a single one.
    """
    count = target.num_classes
    if target.score == "value" and not target.classes:
        return ["value"] if count == 1 else [f"value {number}" for number in range(count)]
    names = list(target.classes or (of_data if len(of_data) == count else ())) or _trained_classes(target)
    return readable_names(names or [f"class {number}" for number in range(count)])


def _trained_classes(target: Any) -> list[str]:
    """The classes of a model's training as timm knows them: of its config, or wnids of ImageNet; else none."""
    names = target.backbone.pretrained_cfg.get("label_names")
    if not names and (subset := timm.data.infer_imagenet_subset(target.backbone)):
        names = _load_wordnet(subset).label_names()
    return list(names or ()) if len(names or ()) == target.num_classes else []


def match_classes(names: Sequence[str], target: Any) -> list[int]:
    """Find the logit of each label of a data set: by name where the model has names, also in another order or for some.

    Without names of the model, folders that are called 0 to K - 1 are logits, and others are in the order of the
    logits, which a warning says.

    Args:
        names: class names in the order of the labels; empty for a data set without classes.
        target: the model.

    Raises:
        InputError: if the model's names lack one of the data set, or without names, if it has another number of them.
    """
    known, count = list(target.classes), target.num_classes
    if not known and set(names) <= set(trained := _trained_classes(target)):
        known = trained
    if not names or known and set(names) <= set(known):
        return [known.index(name) for name in names] if names else list(range(count))
    shown = [f"{', '.join(some[:5])}{', ...' * (len(some) > 5)}" for some in (known, list(names))]
    if known or len(names) != count:
        raise InputError(
            f"expected images of the head's {count} classes{f' ({shown[0]})' * bool(known)}, got"
            f" {len(names)} ({shown[1]}): give the head of this task with head=, or other images",
            "head",
        )
    numbered = set(names) == {str(number) for number in range(count)}
    order = "a folder's number is taken as its logit" if numbered else f"the order is taken as {shown[1]}"
    unknown = f"the classes of {target.name} are unknown, because its head has no names"
    warnings.warn(f"{unknown}: {order}; if it was trained in another, give a head with names", stacklevel=2)
    return [int(name) for name in names] if numbered else list(range(count))


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
    """The names of classes that a user gives; an InputError unless there is one for each of `count` classes."""
    if len(classes) != count:
        shown = f" ({classes[0]!r} to {classes[-1]!r})" if classes else ""
        raise InputError(
            f"class_names: expected a list of names of the model's {count} classes, got {len(classes)}{shown}: give one"
            " for each logit, in order; a file has one in a line, or JSON",
            "class_names",
        )
    return [str(name) for name in classes]


def read_names(file: str | Path) -> list[str]:
    """Read names of classes: a text file with one in a line, or JSON.

    JSON holds a list of names, index → name, name → index (class_to_idx), index → [wnid, name] (Keras), or one of these
    as id2label or class_to_idx among other entries.

    Raises:
        InputError: for a file that does not exist, or holds something else.
    """
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        names = _parse_names(json.loads(text)) if Path(file).suffix == ".json" else text.rstrip().splitlines()
        if not all(isinstance(name, str) for name in names):
            raise ValueError("it holds no names")
        if blank := [number for number, name in enumerate(names, 1) if not name.strip()]:
            raise ValueError(f"name {blank[0]} is blank")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"expected a file of names of classes, one in a line, or JSON as [name, ...], {{index: name}} or {{name:"
            f" index}}, got {file} ({reason}): give another file"
        ) from error
    return [name.strip() for name in names]


def _parse_names(found: Any) -> list[Any]:
    """The names in JSON, in the order of their indices; see `read_names`."""
    if isinstance(found, dict):
        found = next((found[key] for key in ("id2label", "class_to_idx") if key in found), found)
    if isinstance(found, dict):
        by_name = all(type(value) is int for value in found.values())
        by_index = {value: key for key, value in found.items()} if by_name else {int(key): found[key] for key in found}
        if len(by_index) != len(found) or set(by_index) != {*range(len(found))}:
            raise ValueError(f"its indices are not 0 to {len(found) - 1}, each once")
        found = [by_index[number] for number in range(len(found))]
    if not isinstance(found, list):
        raise ValueError("it holds no names")
    return [each[-1] if isinstance(each, list) and each else each for each in found]


def _is_wnid(name: str) -> bool:
    return re.fullmatch(r"n\d{8}", name) is not None


def _describe(wnid: str, detailed: bool = False) -> str:
    """What WordNet calls a wnid: its names, and with `detailed` its definition; an unknown one stays as it is."""
    try:
        return _load_wordnet().label_name_to_description(wnid, detailed)
    except KeyError:
        return wnid


@cache
def _load_wordnet(subset: str = "imagenet-1k") -> timm.data.ImageNetInfo:
    return timm.data.ImageNetInfo(subset)


def class_index(wanted: SupportsIndex | str, names: Sequence[str], setting: str = "classes") -> int:
    """Find a class by its name, in capital or small letters, or by its index.

    An InputError about `setting` for a class that does not exist names those that have it as a word, or are most alike.

    >>> class_index("Polar_bear", ["zebra", "polar bear"])
    1
    >>> class_index("Crane", ["Crane", "crane"])
    0
    >>> class_index("bear", ["beaver", "bearskin", "polar bear"])
    Traceback (most recent call last):
    explainers.errors.InputError: classes=bear: expected one of the model's 3 classes: did you mean polar bear?
    """
    if not isinstance(wanted, str):
        try:
            number = -1 if isinstance(wanted, bool) else index(wanted)  # also of NumPy, and a tensor of one number
        except TypeError as error:
            raise InputError(f"{setting}={wanted!r}: expected names or indices of classes", setting) from error
        if 0 <= number < len(names):
            return number
        raise InputError(f"{setting}={wanted}: expected 0 to {len(names) - 1}, or names of classes", setting)
    meant = (_describe(wanted, detailed=True), _describe(wanted).split(", ")[0]) if _is_wnid(wanted) else ()
    for name in (wanted, *meant):
        if name in names:  # another class may have the same name in capitals
            return names.index(name)
    by_name = {name.lower(): index for index, name in enumerate(names)}
    plain = wanted.strip().lower()
    for spelling in (plain, plain.replace("_", " ")):
        if spelling in by_name:
            return by_name[spelling]
    if plain.isdecimal():  # as files of classes have it
        return class_index(int(plain), names, setting)
    containing = [name for name in by_name if plain and plain in name]
    as_words = [name for name in containing if re.search(rf"\b{re.escape(plain)}\b", name)]
    close = as_words or list(dict.fromkeys([*difflib.get_close_matches(plain, by_name, 3), *containing]))
    hint = f"did you mean {', '.join(names[by_name[name]] for name in close[:5])}?" if close else "name it by its index"
    raise InputError(f"{setting}={wanted}: expected one of the model's {len(names)} classes: {hint}", setting)


def find_image_classes(classes: Any, names: Sequence[str], count: int, setting: str = "classes") -> list[int | None]:
    """Find the class of each of `count` images, given one for all or one for each; `None` as it is."""
    if hasattr(classes, "tolist"):  # a tensor or an array
        classes = classes.tolist()
    if classes is None:
        return [None] * count
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        return [class_index(classes, names, setting)] * count
    if len(classes) != count:
        advice = "for several classes of an image, take explanation.of(...)" if setting == "classes" else "give as many"
        wanted = f"one class, or one for each of {count} images"
        raise InputError(f"{setting}: expected {wanted}, got {len(classes)}: {advice}", setting)
    return [class_index(each, names, setting) for each in classes]


def find_other_classes(against: Any, chosen: Sequence[int | None], names: Sequence[str]) -> list[int]:
    """Find the classes from which the `chosen` ones are told apart; an InputError if one of them is chosen, too."""
    listed = against if isinstance(against, Sequence) and not isinstance(against, str) else [against]
    others = [] if against is None else [class_index(each, names, "against") for each in listed]
    for other in set(others) & set(chosen):
        raise InputError(
            f"against={names[other]!r}: expected another class than the explained one: name one", "against"
        )
    if others and len(set(others)) == len(names):
        raise InputError(f"against= names all {len(names)} classes: leave out the one to explain", "against")
    return others
