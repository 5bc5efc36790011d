"""`explainers benchmark`: how faithful explainers are on the user's own images."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from explainers.app.explain_command import check_writable
from explainers.app.options import announce_passes, set_passes, start_sessions
from explainers.app.photos import list_photos
from explainers.app.session import Session
from explainers.errors import InputError, needs
from explainers.saved.files import write_atomically
from explainers.saved.records import devices, versions


def benchmark(options: Namespace) -> None:
    """Measure explainers on images without labels; print a table, and write a JSON file with all settings."""
    needs("torchmetrics", "methods", "explainers benchmark")
    from explainers.app.evaluating import LEVELS, measure_photos
    from explainers.evaluation.evaluation import Evaluation
    from explainers.evaluation.result import CURVES

    output: Path = options.output
    if output.is_dir():
        raise InputError(f"expected a file for the numbers, got the folder {output}: name a file, as in {output}.json")
    photos = list_photos(options.images)[: options.limit]
    check_writable(output.parent)
    sessions = build_sessions(options)
    announce_passes(sessions, len(photos))
    session = sessions[0]
    explainers = {each.method: each.explainer for each in sessions}
    settings = Evaluation(session.target.grid, CURVES, LEVELS, localization=(), agreement=())
    try:
        result = measure_photos(session, explainers, photos, settings, options.batch_size)
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"without {output}: the same command starts again with the first image")
        raise
    minus = sessions[options.method.index("auto")].method if "auto" in options.method else "Chance"
    print(f"{session.target.name}: the predicted class of each image, hidden patches are zero\n")
    content = {
        "command": sys.argv,
        "packages": versions(),
        "devices": devices(),
        "settings": {"removal": "zero", "levels": LEVELS, "classes": "predicted"},
        "identity": session.target.identity(),
        "transform": result.transform,
        "images": result.images,
        "results": result.numbers,
        "differences": print_tables(result, minus),
    }
    write_atomically(output, json.dumps(content, indent=2))
    print(f"{output} has the numbers, curves and settings")


def build_sessions(options: Namespace) -> list[Session]:
    """The model with each of the explainers that the options name; by default those of `add_default_methods`."""
    from explainers.app.evaluating import add_default_methods

    passes, options.passes = options.passes, None
    options.method = options.methods or ["auto"]
    sessions = start_sessions(options)
    if options.methods is None:
        sessions = add_default_methods(sessions[0])
    if passes:
        set_passes(sessions, passes)
    return sessions


def print_tables(result: Any, minus: str) -> dict[str, Any]:
    """Print the numbers of an `EvaluationResult`, and their differences from one explainer; return all differences."""
    from explainers.metrics.means import ImageScores
    from explainers.report.differences import compare_pairs, difference_tables
    from explainers.report.tables import markdown, rows

    task = f"{len(result.images)} image{'s' * (len(result.images) > 1)}"
    print(markdown(rows({task: result.numbers}, result.columns)))
    if len(result.images) == 1:
        return {}
    titles = {name: title for name, title in result.columns.items() if name in next(iter(result.scores.values()))}
    scores = ImageScores(torch.arange(len(result.images)), result.scores)
    pairs = compare_pairs({task: result.numbers}, {task: scores}, titles)
    print(difference_tables({task: result.numbers}, pairs, titles, minus=minus)["differences.md"])
    return {number: _as_lists(*of_number) for number, of_number in pairs[task].items()}


def _as_lists(names: list[str], pairs: Any) -> dict[str, Any]:
    """The pairs of explainers as JSON: entry [i][j] is explainer i minus explainer j; `null` where there is none."""
    tensors = {"mean": pairs.mean, "error": pairs.error, "p_holm": pairs.corrected}
    lists = {key: [[x if x == x else None for x in row] for row in each.tolist()] for key, each in tensors.items()}
    return {"explainers": names} | lists
