"""`explainers benchmark`: how faithful explainers are on the user's own images."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from explainers import posthoc
from explainers.app.batch_size import batch_size_for
from explainers.app.choosing import COMPARED
from explainers.app.command import printed
from explainers.app.explain_command import session_of
from explainers.app.photos import decoded_batches, photos_of
from explainers.app.picture_files import check_writable
from explainers.app.session import Session
from explainers.errors import InputError, needs
from explainers.posthoc.names import labelled
from explainers.saved.files import write_atomically
from explainers.saved.records import devices, versions

BATCH = 8
"""Largest number of images that are measured at once, unless another one is asked for."""


def benchmark(options: Namespace) -> None:
    """Measure explainers on images without labels; print a table, and write a JSON file with all settings."""
    needs("torchmetrics", "methods", "explainers benchmark")
    from explainers.app.benchmark import COLUMNS, CURVES, LEVELS, measure
    from explainers.report.differences import compared, difference_tables
    from explainers.report.tables import markdown, rows

    output = Path(options.output).expanduser()
    if output.is_dir():
        raise InputError(f"expected a file for the numbers, got the folder {output}: name a file, as in {output}.json")
    photos = photos_of(options.images)[: options.limit]
    check_writable(output.parent)
    method = "auto" if options.methods is None or "auto" in options.methods else "Chance"
    session = session_of(Namespace(**vars(options), method=method))
    explainers = explainers_for(session, options.methods)
    fitting = (batch_size_for(explainer, session.target) for explainer in explainers.values())
    pictures = _Decoded(session, photos, options.batch_size or min(BATCH, *fitting))
    results, scores = measure(session.target, explainers, pictures)
    task = f"{len(pictures.names)} image{'s' * (len(pictures.names) > 1)}"
    print(f"{session.target.name}: the predicted class of each image, hidden patches are zero\n")
    print(printed(markdown(rows({task: results}, COLUMNS))))
    curves: dict[str, str] = {name: COLUMNS[name] for name in CURVES}
    pairs = compared({task: results}, {task: scores}, curves) if len(pictures.names) > 1 else {}
    if pairs:
        tables = difference_tables({task: results}, pairs, curves, minus=session.method)
        print(printed(tables["differences.md"]))
    content = {
        "command": sys.argv,
        "packages": versions(),
        "devices": devices(),
        "settings": {"removal": "zero", "levels": LEVELS, "classes": "predicted"},
        "identity": session.target.identity(),
        "images": pictures.names,
        "results": results,
        "differences": {number: _as_lists(*of_number) for number, of_number in pairs.get(task, {}).items()},
    }
    write_atomically(output, json.dumps(content, indent=2))
    print(f"{output} has the numbers, curves and settings")


def explainers_for(session: Session, methods: Sequence[str] | None) -> dict[str, Any]:
    """Name → explainer: chance, the explainer of the session, and methods.

    Args:
        session: the model and its explainer.
        methods: names of methods; `auto` is the explainer of the session. `None` takes those of
            `COMPARED` that explain the model.
    """
    target = session.target
    explainers: dict[str, Any] = {"Chance": posthoc.Chance(target, target.grid)}
    for label, (name, settings) in labelled(methods if methods is not None else ["auto", *COMPARED]).items():
        if name == "auto":
            explainers[session.method] = session.explainer
            continue
        try:
            explainers[label] = posthoc.build(name, target, target.grid, settings)
        except InputError:
            if methods is not None:
                raise
    return explainers


class _Decoded:
    """Batches of photos as the model sees them, uint8 (B, C, S, S), with the `names` of those that were read."""

    def __init__(self, session: Session, photos: Sequence[Any], batch_size: int) -> None:
        self.session = session
        self.photos = photos
        self.batch_size = batch_size
        self.names: list[str] = []

    def __iter__(self) -> Iterator[Tensor]:
        size = self.session.target.grid.image_size
        batches = decoded_batches(self.photos, size, self.session.resampling, self.batch_size, "measuring")
        for photos, pixels, _ in batches:
            self.names += [photo.name for photo in photos]
            yield pixels


def _as_lists(names: list[str], pairs: Any) -> dict[str, Any]:
    """The pairs of explainers as JSON: entry [i][j] is explainer i minus explainer j; `null` where there is none."""
    tensors = {"mean": pairs.mean, "error": pairs.error, "p_holm": pairs.corrected}
    lists = {key: [[x if x == x else None for x in row] for row in each.tolist()] for key, each in tensors.items()}
    return {"explainers": names} | lists
