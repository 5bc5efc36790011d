"""The trained explainers that are shipped with this package."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Available:
    """A trained explainer that `load` finds by the name of its model.

    Args:
        name: name of the model in timm, with the tag of its weights.
        explainer: what explains it, such as `anyhead`.
        bytes: size of its weights.
        measured: name of a number → explainer or method → value.
        command: the command that trains one for another backbone.
        folder: where it is.
    """

    name: str
    explainer: str
    bytes: int
    measured: Mapping[str, Mapping[str, Any]]
    command: str
    folder: Path


class Catalogue(list[Available]):
    """Trained explainers, shown as a table."""


def available() -> Catalogue:
    """List the trained explainers that are shipped with this package."""
    return Catalogue()
