"""Logs pictures and curves as tables of Weights & Biases."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from explainers.report.gallery import Picture
from explainers.report.overlays import overlay


def log_pictures(logger: Any, task: str, pictures: Sequence[Picture]) -> None:
    """Log a table with a row for each image: the image, its label, the explained class, and all overlays of it.

    Args:
        logger: Lightning's logger of W&B.
        task: name of the task; the table is `<task>/pictures`.
        pictures: the images, with the same explainers.
    """
    import wandb  # slow to import, and only needed here

    def shown(image: Tensor) -> Any:
        return wandb.Image(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))

    rows = []
    for picture in pictures:
        own = next(iter(picture.classes))
        overlays = [overlay(picture.image, heatmaps[own]) for heatmaps in picture.heatmaps.values()]
        rows.append([picture.name, picture.label, own, shown(picture.image), *map(shown, overlays)])
    columns = ["name", "label", "class", "image", *pictures[0].heatmaps]
    logger.log_table(key=f"{task}/pictures", columns=columns, data=rows)


def log_curves(logger: Any, task: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Log the curves of all explainers as one table, with a row for each explainer and sparsity.

    Args:
        logger: Lightning's logger of W&B.
        task: name of the task; the table is `<task>/curves`.
        results: explainer → numbers, as `EvaluationModule` measures them.
    """
    curves = list(dict.fromkeys(key for row in results.values() for key in row if key.endswith("_curve")))
    rows = [
        [name, *values]
        for name, row in results.items()
        for values in zip(row.get("sparsity", ()), *(row[key] for key in curves if key in row), strict=True)
    ]
    if rows:
        logger.log_table(key=f"{task}/curves", columns=["explainer", "sparsity", *curves], data=rows)
