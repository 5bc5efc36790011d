"""Logs pictures and curves as tables of Weights & Biases."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from explainers.report.gallery import Picture
from explainers.report.overlays import CONSTANT, colour_scale, overlay


def log_pictures(logger: Any, task: str, pictures: Sequence[Picture]) -> None:
    """Log a table with a row for each image: the image, its label, the explained class, and all overlays of it.

    The caption of an overlay says what its colours mean.

    Args:
        logger: Lightning's logger of W&B.
        task: name of the task; the table is `<task>/pictures`.
        pictures: the images, with the same explainers.
    """
    import wandb  # slow to import, and only needed here

    def shown(image: Tensor, caption: str | None = None) -> Any:
        return wandb.Image(np.ascontiguousarray(image.permute(1, 2, 0).numpy()), caption=caption)

    def drawn(picture: Picture, explainer: str, heatmap: Tensor) -> Any:
        scale = colour_scale(heatmap, picture.signed.get(explainer))
        colours = "red supports the class, blue opposes it" if scale.signed else "yellow is more important"
        return shown(overlay(picture.image, heatmap, signed=scale.signed), CONSTANT if scale.constant else colours)

    rows = []
    for picture in pictures:
        own = next(iter(picture.classes))
        overlays = [drawn(picture, name, heatmaps[own]) for name, heatmaps in picture.heatmaps.items()]
        rows.append([picture.name, picture.label, own, shown(picture.image), *overlays])
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
