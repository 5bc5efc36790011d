"""The trained explainers that are shipped with this package, a folder for each model and explainer."""

from __future__ import annotations  # so that torch and timm are imported by what needs them: `explainers list` does not

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explainers.errors import InputError

if TYPE_CHECKING:
    from explainers.models import TargetModel

SHIPPED = Path(__file__).parents[1] / "shipped"
"""Holds `<name of the model in timm, with its tag>/<explainer>/`, folders that `benchmarks/shipping.py` writes."""

FILE = "explainer.safetensors"
MEASURED = "measured.json"

COMMANDS = {
    "anyhead": "python train.py experiment=anyhead target={model} data.root=<folder of images>",
    "tve": "python train.py experiment=tve_vit_tiny target={model}",
}
"""Explainer → the command that trains one in the checkout. The first one is preferred where a model has both."""

EXPLAINERS = tuple(COMMANDS)

VECTOR = "vector.safetensors"

VECTOR_COMMANDS = {"vector": "python train.py experiment=studies/vector_source target={model} data_dir=<folder>"}
"""The same for the explainability vectors of `explainers.vectors`, which are added to models."""


@dataclass(frozen=True)
class Available:
    """A trained explainer that `load` finds by the name of its model.

    Args:
        name: name of the model in timm, with the tag of its weights.
        explainer: what explains it, such as `anyhead`.
        bytes: size of its weights.
        measured: name of a number → explainer or method → value; and `settings` of the measurement.
        command: the command that trains one for another model.
        folder: where it is.
    """

    name: str
    explainer: str
    bytes: int
    measured: Mapping[str, Mapping[str, Any]]
    command: str
    folder: Path

    def __repr__(self) -> str:
        numbers = {name: values for name, values in self.measured.items() if name != "settings"}
        rows = dict.fromkeys(row for values in numbers.values() for row in values)
        width = max(map(len, rows), default=0)
        lines = [f"{self.name}  {self.explainer}  {self.bytes / 1e6:.1f} MB"]
        if numbers:
            lines.append("  " + "  ".join([" " * width, *numbers]))
        for row in rows:
            cells = [format(values[row], ".3f") if row in values else "" for values in numbers.values()]
            aligned = [cell.rjust(len(name)) for cell, name in zip(cells, numbers, strict=True)]
            lines.append("  " + "  ".join([row.ljust(width), *aligned]))
        if settings := self.measured.get("settings"):
            lines.append("  measured on " + "; ".join(map(str, settings.values())))
        return "\n".join(lines)


class Catalogue(list[Available]):
    """Trained explainers, shown as a table."""

    def __repr__(self) -> str:
        if not self:
            return "no trained explainer or vector is shipped with this installation"
        commands = dict.fromkeys(each.command for each in self)
        return "\n".join([*map(repr, self), "", "For another model:", *(f"  {command}" for command in commands)])


def available() -> Catalogue:
    """List the trained explainers that are shipped with this package.

    >>> isinstance(available(), list)
    True
    """
    return list_shipped(COMMANDS, FILE)


def list_shipped(commands: Mapping[str, str], file: str) -> Catalogue:
    """List the shipped folders, named in `commands`, below the folders of models, that hold a file of this name."""
    return Catalogue(
        Available(
            name=model.name,
            explainer=explainer,
            bytes=(folder / file).stat().st_size,
            measured=json.loads((folder / MEASURED).read_text(encoding="utf-8")),
            command=command.format(model="<name in timm>"),
            folder=folder,
        )
        for model in sorted(SHIPPED.glob("*"))
        for explainer, command in commands.items()
        if ((folder := model / explainer) / file).is_file()
    )


def shipped(name: str, among: Catalogue | None = None) -> Available | None:
    """Find a trained explainer by the name of its model in timm; `None` if there is none.

    Args:
        name: the name, without a tag for the weights that timm takes by default. `/tve` at its end chooses an
            explainer; without it, the first one in `COMMANDS` is taken.
        among: what to search; `None` for the trained explainers.
    """
    model, _, explainer = name.partition("/")
    tagged = model if "." in model else _with_default_tag(model)
    entries = available() if among is None else among
    return next((each for each in entries if each.name == tagged and explainer in ("", each.explainer)), None)


def _with_default_tag(model: str) -> str:
    import timm

    config = timm.get_pretrained_cfg(model, allow_unregistered=True)
    return f"{model}.{config.tag}" if config is not None and config.tag else model


def for_target(target: TargetModel) -> Catalogue:
    """List the trained explainers of a model's backbone, whatever the model is called and wherever it comes from."""
    from explainers.saved.identity import is_rounded_copy
    from explainers.saved.weights import read_header

    headers = [(each, read_header(each.folder / FILE)) for each in available()]
    alike = [(each, header) for each, header in headers if header["target"].get("embed_dim") == target.embed_dim]
    if not alike:
        return Catalogue()  # without a hash, which reads all weights
    own = target.backbone_identity()
    return Catalogue(
        each
        for each, header in alike
        if header["target"]["architecture_sha256"] == own["architecture_sha256"]
        and (
            header["target"]["backbone_sha256"] == own["backbone_sha256"]
            or is_rounded_copy(target.backbone, header.get("sketch"))
        )
    )


def not_shipped(target: TargetModel, explainer: str) -> InputError:
    """The error for an explainer that is not shipped for a model."""
    known = ", ".join(each.name for each in available() if each.explainer == explainer) or "none"
    return InputError(
        f"expected a backbone for which {explainer} is shipped ({known}), got {target.name} with other weights,"
        " hooks or replaced methods: train"
        f" one with `{COMMANDS[explainer].format(model=target.name)}`, and give its folder"
    )
