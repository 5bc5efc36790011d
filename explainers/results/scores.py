"""The numbers of single images, in one file beside results.json, so that explainers are compared on the same images."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from explainers.results.reading import load, names_in_tables
from explainers.saved.files import is_first_process
from explainers.saved.weights import read_tensors, save_tensors


@dataclass(frozen=True)
class ImageScores:
    """Numbers of the images of one task.

    Args:
        index: index of each image in the data set, ascending, int64 (images,).
        rows: explainer → number → its value for each image, float32 (images,); NaN for an image without one.
    """

    index: Tensor
    rows: Mapping[str, Mapping[str, Tensor]]

    def only(self, names: Collection[str]) -> "ImageScores":
        """The rows of these explainers."""
        return ImageScores(self.index, {name: row for name, row in self.rows.items() if name in names})

    def joined(self, other: "ImageScores") -> "ImageScores":
        """The rows of both, of `other` where both have an explainer; NaN for an image that only one of them has.

        >>> one = ImageScores(torch.tensor([0, 1]), {"a": {"x": torch.tensor([0.0, 1.0])}})
        >>> both = one.joined(ImageScores(torch.tensor([1, 2]), {"b": {"x": torch.tensor([5.0, 6.0])}}))
        >>> both.index.tolist(), both.rows["b"]["x"].tolist()
        ([0, 1, 2], [nan, 5.0, 6.0])
        """
        index = torch.cat([self.index, other.index]).unique()
        rows: dict[str, dict[str, Tensor]] = {}
        for part in (self, other):
            places = torch.searchsorted(index, part.index)
            for name, row in part.rows.items():
                empty = torch.full((len(index),), torch.nan)
                rows[name] = {number: empty.index_copy(0, places, values) for number, values in row.items()}
        return ImageScores(index, rows)


def scores_file(results: Path) -> Path:
    """The file of scores that belongs to a file of results.

    >>> scores_file(Path("runs/mine/results.json")).as_posix()
    'runs/mine/results_scores.safetensors'
    """
    return results.with_name(f"{results.stem}_scores.safetensors")


def write_scores(results: Path, scores: Mapping[str, ImageScores]) -> None:
    """Write the scores of all tasks: `<task>/index`, and `<task>/<explainer>/<number>` as float32.

    Args:
        results: the file of results that they belong to.
        scores: task → numbers of its images; without any, the file is deleted.
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


def load_scores(path: str | Path, results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, ImageScores]:
    """Read the scores that belong to a file of results: task → numbers of its images; empty without a file of scores.

    Numbers whose mean differs from that in the results are left out: they are of another measurement, such as one that
    was interrupted.

    Args:
        path: the file of results.
        results: its content, task → explainer → numbers.

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
