"""Files of results: rows, which an evaluation writes and joins; results.json, which tables and figures are made of."""

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from explainers.errors import InputError, check_distinct
from explainers.metrics.means import ImageScores
from explainers.saved.files import file_name, is_first_process, printable, write_atomically
from explainers.saved.identity import first_difference
from explainers.saved.weights import read_tensors, save_tensors

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Task → explainer → numbers, as `EvaluationModule` measures them."""

COSTS = "images_per_second", "peak_memory", "forward_passes"
"""Numbers that depend on the machine, the batches or a cache; two files may differ in them."""

TABLES = "results", "columns", "identity", "rows"
"""Parts of a file of results that have an entry for each task."""


def load(path: str | Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        InputError: if there is no file, or it is not a results file.
    """
    if not Path(path).is_file():
        raise InputError(f"no results at {path}: measure first, with `python eval.py`, or correct results.files")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8, and integers of too many digits
        raise InputError(f"{path}: expected the results.json of an evaluation, got no JSON ({error})") from None
    tasks = content.get("results") if isinstance(content, dict) else None
    rows = [*tasks.values()] if isinstance(tasks, dict) else [None]
    if not all(isinstance(row, dict) and all(isinstance(each, dict) for each in row.values()) for row in rows):
        raise InputError(f"{path}: expected the results.json of an evaluation, got JSON without results of tasks")
    for name in [*content["results"], *(name for rows in content["results"].values() for name in rows)]:
        if not name or printable(name) != name:  # control characters could steer the terminal, or break a table
            raise InputError(f"{path}: expected names that can be printed, got {ascii(name)}: rename it in the file")
    return content


def read_results(files: Sequence[str | Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """Merge the results of several files; an explainer with equal results in two files is included once.

    IoU@K has the name `iou_<K>`, because files may differ in K.

    Raises:
        InputError: if two files have different results of one explainer on one task, or different settings of a task,
            or a file is listed twice.
    """
    check_distinct(**{"results.files": [str(Path(path).resolve()) for path in files]})
    results: dict[str, dict[str, dict[str, Any]]] = {}
    origin: dict[tuple[str, str], str | Path] = {}
    measured: dict[str, tuple[str | Path, dict[str, Any]]] = {}
    for path in files:
        content = load(path)
        for task, explainers in content["results"].items():
            data = content.get("data", {}).get(task)
            identity = content.get("identity", {}).get(task, {}) | ({"data": data} if data else {})
            first, other = measured.setdefault(task, (path, identity))
            _check_alike(f"{task} in {first} and {path}", other, identity)
            measured[task] = first, identity | other
            merged, names = results.setdefault(task, {}), names_in_tables(content, task)
            for name, written in explainers.items():
                numbers = {names.get(key, key): value for key, value in written.items()}
                if name in merged and _without_costs(merged[name]) != _without_costs(numbers):
                    raise InputError(
                        f"expected one result of {name} on {task}, got two, in {origin[task, name]} and {path}: "
                        "leave a file out, or measure one of them under another name:"
                        " +explainers@explainers.<name>=..."
                    )
                origin.setdefault((task, name), path)
                merged.setdefault(name, numbers)
    return results


def read_columns(files: Sequence[str | Path]) -> dict[str, str]:
    """Number → column title of several files, in the order of the columns."""
    titles: dict[str, str] = {}
    for path in files:
        content = load(path)
        for task, columns in content.get("columns", {}).items():
            names = names_in_tables(content, task)
            titles |= {names.get(key, key): title for key, title in columns.items()}
    return titles


def names_in_tables(content: Mapping[str, Any], task: str) -> dict[str, str]:
    """Name of a number in a file → its name in tables of several files."""
    k = re.fullmatch(r"IoU@(\d+).*", content.get("columns", {}).get(task, {}).get("iou", ""))
    return {f"iou{part}": f"iou_{k[1]}{part}" for part in ("", "_error", "_sd")} if k else {}


def _check_alike(where: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compare the settings in both identities, except the accuracy: rounding on another device may change a class."""
    shared = sorted((one.keys() & other.keys()) - {"accuracy"})
    difference = first_difference({key: one[key] for key in shared}, {key: other[key] for key in shared})
    if difference:
        raise InputError(f"{where} cannot be compared, they differ in {difference}: measure both alike")


def _without_costs(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers without costs and standard deviations, which not every file has."""
    return {key: value for key, value in numbers.items() if key not in COSTS and not key.endswith("_sd")}


def scores_file(results: Path) -> Path:
    """The file of scores that belongs to a file of results.

    >>> scores_file(Path("runs/mine/results.json")).as_posix()
    'runs/mine/results_scores.safetensors'
    """
    return results.with_name(f"{results.stem}_scores.safetensors")


def write_scores(results: Path, scores: Mapping[str, ImageScores]) -> None:
    """Write the scores that belong to a file of results: `<task>/index`, and `<task>/<explainer>/<number>` as float32.

    Without any scores, their file is deleted.
    """
    if not is_first_process():
        return
    tensors = {f"{task}/index": of_task.index for task, of_task in scores.items()}
    for task, of_task in scores.items():
        for name, row in of_task.rows.items():
            tensors |= {f"{task}/{name}/{number}": values for number, values in row.items()}
    if tensors:
        save_tensors(tensors, scores_file(results))
    else:
        scores_file(results).unlink(missing_ok=True)


def load_scores(path: str | Path, results: Results) -> dict[str, ImageScores]:
    """Read the scores that belong to a file of results with the numbers `results`; empty if there are none.

    Scores whose mean is not the number in the results are left out: they belong to another measurement.

    Raises:
        InputError: if the file of scores is damaged.
    """
    file = scores_file(Path(path))
    if not file.is_file():
        return {}
    tensors = read_tensors(file, "the scores of images")[1]
    scores = {}
    for task, explainers in results.items():
        index = tensors.get(f"{task}/index", torch.zeros(0))
        rows = {
            name: {
                number: values
                for number, mean in numbers.items()
                if (values := tensors.get(f"{task}/{name}/{number}")) is not None
                and values.shape == index.shape
                and _has_mean(values, mean)
            }
            for name, numbers in explainers.items()
        }
        scores[task] = ImageScores(index, {name: row for name, row in rows.items() if row})
    return {task: of_task for task, of_task in scores.items() if of_task.rows}


def _has_mean(values: Tensor, mean: float) -> bool:
    limit = 1e-5 * max(1.0, values.nan_to_num().abs().max().item() if len(values) else 1.0)
    return abs(values.double().nanmean().item() - mean) <= limit


def read_scores(files: Sequence[str | Path]) -> dict[str, ImageScores]:
    """Join the scores of several files of results, which `read_results` has found to be comparable.

    An explainer that two files have is taken from the first. Numbers have the names of `read_results`.
    """
    joined: dict[str, ImageScores] = {}
    for path in files:
        content = load(path)
        for task, scores in load_scores(path, content["results"]).items():
            names = names_in_tables(content, task)
            rows = {
                name: {names.get(number, number): values for number, values in row.items()}
                for name, row in scores.rows.items()
            }
            renamed = ImageScores(scores.index, rows)
            joined[task] = renamed.joined(joined[task]) if task in joined else renamed
    return joined


def row_file(folder: Path, task: str, explainer: str, key: str) -> Path:
    """The file of a row in the folder of a run."""
    return folder / "rows" / file_name(task) / f"{file_name(explainer, 150)}-{file_name(key, 50)}.json"


@dataclass(frozen=True)
class Row:
    """The numbers of one explainer on one task. Their file is a file of results with a single row.

    Args:
        folder: folder of the run.
        task: name of the task.
        explainer: name of the explainer.
        settings: all that the numbers depend on, as JSON values.
    """

    folder: Path
    task: str
    explainer: str
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Hash of the names and the settings."""
        text = json.dumps([self.task, self.explainer, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """The file of the row; with other settings it is another one."""
        return row_file(self.folder, self.task, self.explainer, self.key)

    def find_change(self) -> str | None:
        """Describe the first setting that differs from the latest row of this name; `None` without such a row."""
        same_name = glob.escape(self.path.name.removesuffix(f"{self.key}.json")) + "?" * len(self.key) + ".json"
        others = sorted(self.path.parent.glob(same_name), key=lambda path: path.stat().st_mtime)
        return first_difference(load(others[-1])["settings"], self.settings) if others else None

    def write(self, evaluation: Any, run: Mapping[str, Any]) -> None:
        """Write the numbers of an `EvaluationModule` after its test, and those of single images beside them.

        Args:
            evaluation: the module.
            run: command, versions and devices.
        """
        name, reference = self.explainer, self.settings.get("reference")
        tables = {
            "results": {name: evaluation.results[name]},
            "columns": evaluation.columns,
            "identity": evaluation.identity() | ({"settings of the reference": reference} if reference else {}),
            "rows": {name: self.key},
        }
        scores = evaluation.scores
        own = None if scores is None else ImageScores(scores.index, {name: scores.rows[name]})
        write_scores(self.path, {} if own is None else {self.task: own})
        content = {table: {self.task: part} for table, part in tables.items()}
        write_atomically(self.path, json.dumps({**content, "settings": self.settings, "runs": [run]}, indent=2))


def join_rows(path: Path, rows: Sequence[Row], **described: Any) -> None:
    """Write results.json, and the numbers of single images beside it, from the files of rows.

    Args:
        path: path of results.json.
        rows: the rows, all of them measured.
        described: further parts of the file.
    """
    content: dict[str, Any] = {**described, **{table: {} for table in TABLES}}
    scores: dict[str, ImageScores] = {}
    measured: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        own = load(row.path)
        for table in TABLES:
            content[table][row.task] = content[table].get(row.task, {}) | own[table][row.task]
        measured.setdefault(json.dumps(own["runs"][0]), {}).setdefault(row.task, []).append(row.explainer)
        for task, more in load_scores(row.path, own["results"]).items():
            scores[task] = scores[task].joined(more) if task in scores else more
    content["runs"] = [json.loads(run) | {"measured": names} for run, names in measured.items()]
    write_scores(path, scores)
    write_atomically(path, json.dumps(content, indent=2))
