"""`explainers benchmark`: how faithful explainers are on the user's own images."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from explainers import Explainer, posthoc
from explainers.app.choosing import passes_of
from explainers.app.command import printed
from explainers.app.explain_command import session_of, sessions_of
from explainers.app.passes import announce_passes, set_passes
from explainers.app.photos import decoded_batches, photos_of
from explainers.app.picture_files import check_writable
from explainers.app.session import Session
from explainers.errors import InputError, needs
from explainers.posthoc.defaults import COMPARED_METHODS
from explainers.saved.files import write_atomically
from explainers.saved.records import devices, versions

BATCH = 8
"""Largest number of images that are measured at once, unless another one is asked for."""


def benchmark(options: Namespace) -> None:
    """Measure explainers on images without labels; print a table, and write a JSON file with all settings."""
    needs("torchmetrics", "methods", "explainers benchmark")
    from explainers.app.benchmark import COLUMNS, CURVES, LEVELS, measure
    from explainers.evaluation.sweep import Sweep
    from explainers.report.differences import compared, difference_tables
    from explainers.report.tables import markdown, rows

    output: Path = options.output
    if output.is_dir():
        raise InputError(f"expected a file for the numbers, got the folder {output}: name a file, as in {output}.json")
    photos = photos_of(options.images)[: options.limit]
    check_writable(output.parent)
    sessions = sessions_for(options)
    announce_passes(sessions, len(photos))
    session = sessions[0]
    explainers: dict[str, Explainer] = {"Chance": posthoc.Chance(session.target, session.target.grid)}
    explainers |= {each.method: each.explainer for each in sessions}
    sweep = Sweep(session.target, session.target.grid, levels=LEVELS).forward_passes
    passes = sum(passes_of(each.explainer) for each in sessions) + sweep * len(explainers)
    batch_size = options.batch_size or min(BATCH, *(each.batch_size for each in sessions))
    pictures = _Decoded(session, photos, batch_size, passes)
    try:
        results, scores = measure(session.target, explainers, pictures)
    except KeyboardInterrupt as stopped:
        done = f"after {len(pictures.names)} of {len(photos)} images, without {output}"
        stopped.add_note(f"{done}: the same command starts again with the first image")
        raise
    task = f"{len(pictures.names)} image{'s' * (len(pictures.names) > 1)}"
    print(f"{session.target.name}: the predicted class of each image, hidden patches are zero\n")
    print(printed(markdown(rows({task: results}, COLUMNS))))
    curves: dict[str, str] = {name: COLUMNS[name] for name in CURVES}
    pairs = compared({task: results}, {task: scores}, curves) if len(pictures.names) > 1 else {}
    if pairs:
        methods = options.methods or ["auto"]
        minus = sessions[methods.index("auto")].method if "auto" in methods else "Chance"
        tables = difference_tables({task: results}, pairs, curves, minus=minus)
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


def sessions_for(options: Namespace) -> list[Session]:
    """The model with each of the explainers that the options name; by default those of `COMPARED` that explain it."""
    if options.methods is not None:
        return sessions_of(Namespace(**vars(options), method=options.methods))
    automatic = session_of(Namespace(**{**vars(options), "method": ["auto"], "passes": None}))
    sessions = [automatic]
    for method in COMPARED_METHODS:
        with suppress(InputError):
            sessions.append(automatic.with_method(method, "classes"))
    if options.passes:
        set_passes(sessions, options.passes)
    return sessions


class _Decoded:
    """Batches of photos as the model sees them, uint8 (B, C, S, S), with the `names` of those that were measured.

    Args:
        session: the model.
        photos: see `photos_of`.
        batch_size: number of photos in a batch.
        passes: forward passes for each photo.
    """

    def __init__(self, session: Session, photos: Sequence[Any], batch_size: int, passes: int) -> None:
        self.session = session
        self.photos = photos
        self.batch_size = batch_size
        self.passes = passes
        self.names: list[str] = []

    def __iter__(self) -> Iterator[Tensor]:
        size = self.session.target.grid.image_size
        reading = (size, self.session.resampling, self.batch_size, "measuring", self.passes)
        for photos, pixels, _ in decoded_batches(self.photos, *reading):
            yield pixels
            self.names += [photo.name for photo in photos]  # once they are measured


def _as_lists(names: list[str], pairs: Any) -> dict[str, Any]:
    """The pairs of explainers as JSON: entry [i][j] is explainer i minus explainer j; `null` where there is none."""
    tensors = {"mean": pairs.mean, "error": pairs.error, "p_holm": pairs.corrected}
    lists = {key: [[x if x == x else None for x in row] for row in each.tolist()] for key, each in tensors.items()}
    return {"explainers": names} | lists
