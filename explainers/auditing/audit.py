"""What an audit found: groups of evidence, the most suspicious first."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from explainers.auditing.groups import Centres
from explainers.errors import InputError
from explainers.saved.files import write_atomically
from explainers.saved.weights import read_tensors, save_tensors

FILES = "results.json", "groups.safetensors"
"""Files of an audit: its numbers, and the directions of its groups."""

SUSPICIOUS = 0.4
"""A group with at least this suspicion is an alarm.

Measured with ViT-Tiny: the first group of a background that agrees with the class in 95 % of the photos has 0.39 to
0.55, groups of the animals at most 0.35; on plain photos of cats and dogs, 1 of 29 groups is above it.
"""


@dataclass(frozen=True)
class Effect:
    """What hiding patches does to the log-odds of the predicted class: the mean fall, and its standard error."""

    mean: float
    error: float
    images: int


@dataclass(frozen=True)
class Example:
    """An image with patches of a group, or one of the same class without.

    Args:
        number: its place in the list of photos.
        name: its file, relative to the folder.
        label: index of its class; `None` if it is not known.
        predicted: index of the class that the model predicts.
        patches: its patches of the group, those with the most evidence first.
    """

    number: int
    name: str
    label: int | None
    predicted: int
    patches: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """Patches that add the same to a class, such as all that show the sky.

    Args:
        index: its number in the audit, from 0, the most suspicious first.
        class_index: the class for which the patches are evidence.
        share: of the positive evidence for this class in the images predicted as it, from 0 to 1.
        images: number of images that are predicted as the class and have patches of the group.
        image_share: their share among the images predicted as the class.
        accuracy_with: share of images with this label that are predicted right, among those with patches of the group;
            `None` without labels, or without such images. Images may be with a group of a class that is not predicted.
        accuracy_without: the same among images with this label but without the group.
        exclusive: share of the group's patches, over all images, that lie in images predicted as the class.
        positions: share of the group's patches at every place of the grid, rows × columns, which sum to 1.
        places: `border`, `corner`, `centre` → share of the group's patches there, divided by the share of all places.
        hidden: what hiding its patches does; `None` if it was not measured.
        random: what hiding as many other patches of the same images does.
        flipped: share of predictions that change when its patches are hidden.
        off_object: share of its patches outside the object, where masks or a text tell; `None` without.
        sources: share of its images in the folder that has the most of them, among subfolders of the class; `None`
            without subfolders.
        texts: text → similarity, the most similar first, where a text head exists.
        suspicion: from 0 to 1.
        reasons: why it is suspicious, one sentence each.
        examples: images with the group, mistakes first, then those with the most evidence.
        without: images with this label or prediction that lack the group, mistakes first.
        images_without: number of images with this label that lack the group.
    """

    index: int
    class_index: int
    share: float
    images: int
    image_share: float
    accuracy_with: float | None
    accuracy_without: float | None
    exclusive: float
    positions: tuple[tuple[float, ...], ...]
    places: dict[str, float]
    hidden: Effect | None
    random: Effect | None
    flipped: float | None
    off_object: float | None
    sources: float | None
    suspicion: float
    reasons: tuple[str, ...]
    texts: dict[str, float] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    without: tuple[Example, ...] = ()
    images_without: int = 0

    @property
    def is_alarm(self) -> bool:
        """Whether it is suspicious: `SUSPICIOUS`, and hiding it was measured."""
        return self.hidden is not None and self.suspicion >= SUSPICIOUS


@dataclass
class Audit:
    """Groups of evidence of a classifier on a set of images.

    Args:
        groups: the most suspicious first; `groups[i].index` is i.
        classes: names of the model's classes.
        numbers: of all images: `images`, `accuracy` (`None` without labels), `patches` of an image that
            were stored, `stability` of the groups over seeds, `bytes` on disk.
        shape: rows and columns of the grid of patches.
        about: model, explainer, command, versions: what the result depends on.
        centres: the direction of each group, in the order of the groups, which finds its patches again.
    """

    groups: list[Group]
    classes: list[str]
    numbers: dict[str, Any]
    shape: tuple[int, int]
    about: dict[str, Any]
    centres: Centres

    @property
    def suspicious(self) -> list[Group]:
        """The groups that are alarms; none is a result, too."""
        return [group for group in self.groups if group.is_alarm]

    def conclude(self) -> str:
        """Say in one line how many groups are suspicious, or that none is."""
        found, unknown = len(self.suspicious), sum(group.hidden is None for group in self.groups)
        which = f"a suspicion of {SUSPICIOUS} or more" + f"; {unknown} were not measured" * bool(unknown)
        if not found:
            return f"no suspicious group among {len(self.groups)}: none has {which}"
        return f"{found} of {len(self.groups)} groups are suspicious, with {which}"

    @property
    def id(self) -> str:
        """A hash of the directions of the groups and of all numbers and settings, which all files of an audit have."""
        tensors = self.centres.directions, self.centres.classes
        parts = [json.dumps(self._content()).encode(), *(each.contiguous().numpy().tobytes() for each in tensors)]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def _content(self) -> dict[str, Any]:
        content = {key: getattr(self, key) for key in ("classes", "numbers", "shape", "about")}
        return content | {"groups": [asdict(group) for group in self.groups]}

    def save(self, folder: str | Path) -> Path:
        """Write the audit to two files of a folder, `FILES`; returns the first, which programs read."""
        numbers, centres = (Path(folder) / name for name in FILES)
        save_tensors(vars(self.centres), centres, {"audit": self.id})
        write_atomically(numbers, json.dumps({"id": self.id} | self._content(), indent=1, allow_nan=False))
        return numbers

    @classmethod
    def load(cls, folder: str | Path) -> "Audit":
        """Read an audit that `save` wrote; an InputError if the folder has none."""
        numbers, centres = (Path(folder) / name for name in FILES)
        if not numbers.is_file():
            raise InputError(f"expected the folder of an audit, got {folder} without {FILES[0]}: correct the path")
        header, tensors = read_tensors(centres, "groups")
        try:
            content = json.loads(numbers.read_text(encoding="utf-8"))
            stated = content.pop("id")
            groups = [_read_group(group) for group in content.pop("groups")]
            shape = tuple(content.pop("shape"))
            audit = cls(groups=groups, shape=shape, centres=Centres(**tensors), **content)
            if not header.get("audit") == stated == audit.id:
                raise mismatch(folder, *FILES)
            return audit
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{numbers}: expected the results.json of an audit, got another file ({error}): audit again"
            ) from error


def mismatch(folder: str | Path, *names: str) -> InputError:
    """Say that files of a folder are not of one audit."""
    return InputError(
        f"{folder}: expected the files of one audit, but {' and '.join(names)} do not belong together, as where one was"
        " stopped while it wrote: run it again with the same settings"
    )


def _read_group(group: dict[str, Any]) -> Group:
    """Build a group from JSON, in which tuples are lists and effects and examples are dictionaries."""
    effects = {key: None if group[key] is None else Effect(**group[key]) for key in ("hidden", "random")}
    examples = {
        key: tuple(Example(**{**each, "patches": tuple(each["patches"])}) for each in group[key])
        for key in ("examples", "without")
    }
    positions, reasons = tuple(map(tuple, group["positions"])), tuple(group["reasons"])
    return Group(**{**group, **effects, **examples, "positions": positions, "reasons": reasons})
