"""Makes the folder of a trained explainer or vector that is shipped with this package, without paths of a machine."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.saved.files import write_atomically
from explainers.saved.records import leaves
from explainers.saved.weights import read_header
from explainers.share.catalogue import FILE, MEASURED, VECTOR
from explainers.share.model_cards import model_card
from explainers.share.pretrained import CARD, Pretrained, halve, load
from explainers.vectors.vector_files import save_vector


def ship(
    run: str | Path,
    folder: str | Path,
    images: str,
    command: str,
    measured: Mapping[str, Mapping[str, Any]],
    target: TargetModel | None = None,
) -> Path:
    """Write a trained explainer with weights of 16 bits, a model card and its measurements; returns the folder.

    Args:
        run: folder of the run of train.py.
        folder: the folder to write, `explainers/shipped/<name of the model in timm, with its tag>/<explainer>`.
        images: which images it was trained on, and their licence, for the model card.
        command: the command that trained it, with paths that mean something elsewhere.
        measured: name of a number → explainer or method → value, with the trained explainer as one of them; `settings`
            → setting → value says how it was measured.
        target: the model to explain; `None` takes the weights of timm.

    Raises:
        InputError: if a path of this machine would be left in the folder, or the measurements have another form.
    """
    folder = Path(folder)
    _check_measured(measured)
    explainer: Pretrained = load(run, target=target)
    packages = json.loads(explainer.record.get("versions.json", "{}")).get("packages", {})
    versions = {"command": command.removeprefix("python ").split(), "packages": packages}
    _check_paths({"images": images, "versions": versions})
    halve(explainer.export(folder))
    header, kind = read_header(folder / FILE), type(explainer)
    what = (kind.__doc__ or "").partition("\n")[0]
    table = make_table(measured)
    card = model_card(kind.__name__, what, header, versions, table, source=folder.parent.name, images=images)
    return _write_record(folder, card, measured)


VECTOR_USE = """\
self_explaining = explainers.add_vector(model)  # a copy of a model that was fine-tuned from {source}
logits, heatmaps = self_explaining(images)  # uint8 (B, 3, H, W) → (B, K), (B, rows, columns): the predicted classes"""


def ship_vector(
    trained: str | Path,
    folder: str | Path,
    base: TargetModel,
    lambda_2: float,
    images: str,
    command: str,
    measured: Mapping[str, Mapping[str, Any]],
) -> Path:
    """Write an explainability vector that stands alone, a model card and its measurements; returns the folder.

    Args:
        trained: `model.safetensors` of the run of experiment=studies/vector_source.
        folder: the folder to write, `explainers/shipped/<name of the base model in timm, with its tag>/vector`.
        base: the base model, at the image size of the run.
        lambda_2: the λ₂ to recommend, which keeps accuracies of several tasks.
        images: this and the next two: see `ship`.
    """
    folder = Path(folder)
    _check_measured(measured)
    words = command.removeprefix("python ").split()
    _check_paths({"images": images, "command": words})
    header = read_header(save_vector(trained, base, folder / VECTOR, lambda_2))
    what = "Added to the weights of a model that was fine-tuned from this one, it makes the model explain itself."
    record = {"command": words}
    table = make_table(measured)
    card = model_card(
        "ExplainabilityVector", what, header, record, table, source=folder.parent.name, images=images, use=VECTOR_USE
    )
    return _write_record(folder, card, measured)


def _write_record(folder: Path, card: str, measured: Mapping[str, Any]) -> Path:
    """Write the model card and the measurements into the folder of what is shipped."""
    write_atomically(folder / CARD, card)
    write_atomically(folder / MEASURED, json.dumps(measured, indent=2, ensure_ascii=False) + "\n")
    return folder


def make_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Measurements as a Markdown table: a row for each explainer, a column for each number.

    >>> print(make_table({"Fidelity⁺ ↑": {"anyhead": 0.5, "chance": 0.25}, "settings": {"images": 100}}))
    | Explainer | Fidelity⁺ ↑ |
    |---|---|
    | anyhead | 0.500 |
    | chance | 0.250 |
    <BLANKLINE>
    images: 100
    """
    numbers = {name: values for name, values in measured.items() if name != "settings"}
    if not numbers:
        return ""
    explainers = list(dict.fromkeys(explainer for values in numbers.values() for explainer in values))
    lines = ["| Explainer |" + "".join(f" {name} |" for name in numbers), "|---|" + "---|" * len(numbers)]
    for explainer in explainers:
        values = [column.get(explainer) for column in numbers.values()]
        lines.append(f"| {explainer} |" + "".join(f" {'' if v is None else format(v, '.3f')} |" for v in values))
    settings = "; ".join(f"{key}: {value}" for key, value in measured.get("settings", {}).items())
    return "\n".join([*lines, "", settings]).rstrip()


def _check_measured(measured: Mapping[str, Any]) -> None:
    for name, values in measured.items():
        numbers = isinstance(values, Mapping) and all(isinstance(value, int | float) for value in values.values())
        if not numbers and not (name == "settings" and isinstance(values, Mapping)):
            raise InputError(f"expected measured[{name!r}] as numbers, such as {{'chance': 0.35}}, got {values!r}")


def _check_paths(record: Mapping[str, Any]) -> None:
    """Raise an InputError for a path of this machine."""
    for key, value in leaves(record):
        if isinstance(value, str) and re.search(r"(^|[\s=\[(,'\"])(~?/|[A-Za-z]:\\)\w", value):
            raise InputError(f"expected no path of this machine in what is shipped, got {key}: {value}")
