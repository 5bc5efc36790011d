"""What an audit found: groups of evidence, the most suspicious first."""

from dataclasses import dataclass, field
from typing import Any


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
        share: of the positive evidence for this class in images of which it is predicted, from 0 to 1.
        images: number of images of which the class is predicted and that have patches of the group.
        image_share: their share among the images of which the class is predicted.
        accuracy_with: share of images with this label that are predicted right, among those with patches of the group;
            `None` without labels, or without such images. Images may be with a group of a class that is not predicted.
        accuracy_without: the same among images with this label but without the group.
        exclusive: share of the group's patches, over all images, that lie in images of which the class is predicted.
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


@dataclass
class Audit:
    """Groups of evidence of a classifier on a set of images.

    Args:
        groups: the most suspicious first; `groups[i].index` is i.
        classes: names of the model's classes.
        numbers: what is known of all images: `images`, `accuracy` (`None` without labels), `patches` of an image that
            were stored, `stability` of the groups over seeds, `bytes` on disk.
        shape: rows and columns of the grid of patches.
        about: model, explainer, command, versions: what the result depends on.
    """

    groups: list[Group]
    classes: list[str]
    numbers: dict[str, Any]
    shape: tuple[int, int]
    about: dict[str, Any]
