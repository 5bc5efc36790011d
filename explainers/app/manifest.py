"""What programs read of explanations: a JSON object of each, its heatmap as numbers, and the manifest of a folder."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from explainers.app.choosing import estimate_passes
from explainers.app.comparing import Comparison
from explainers.app.explanation import Explanation
from explainers.app.session import Session
from explainers.saved.files import atomic, write_atomically
from explainers.saved.records import devices, versions


def describe_explanation(drawn: Explanation | Comparison, name: str, files: Mapping[str, Path]) -> dict[str, Any]:
    """Describe an explanation as JSON values.

    Args:
        drawn: the explanation, or a comparison of two images.
        files: kind of each written file (`picture`, `heatmap`, `other_heatmap` of a comparison) → its path.

    Returns:
        `image`, `model`, `method`, what is explained with its score, `shape` (rows and columns of the heatmap), and the
        files. Of an explanation also `box`, where in the photo the model's image is (left, top, right and bottom in
        pixels), and the `top` classes.
    """
    shared = {"image": name, "model": drawn.model, "method": drawn.method, "shape": list(drawn.heatmap.shape)}
    shared |= {kind: str(path) for kind, path in files.items()}
    if isinstance(drawn, Comparison):
        return shared | {"other": drawn.other_name, "similarity": drawn.similarity}
    return shared | {
        drawn.kind: asdict(drawn.explained),
        "against": drawn.against or None,
        "quantity": drawn.quantity,
        "top": [asdict(each) for each in drawn.classes],
        "box": drawn.box and list(drawn.box),
    }


def write_heatmap(heatmap: Tensor, path: Path) -> Path:
    """Write a heatmap (rows, columns) as float32 to a .npy file, whole or not at all."""
    with atomic(path) as unfinished:
        np.save(unfinished, heatmap.float().numpy())
    return path


def write_manifest(
    folder: Path, sessions: Sequence[Session], explanations: Sequence[Mapping[str, Any]], failed: Mapping[str, str]
) -> Path:
    """Write `manifest.json`: all on which the files of a folder depend.

    Args:
        sessions: the model, with each of its explainers.
        explanations: those of `describe_explanation`.
        failed: name of each image that could not be explained → reason.
    """
    target = sessions[0].target
    content = {
        "command": sys.argv,
        "model": {"name": target.timm_name, "score": target.score, **target.identity()},
        "transform": asdict(sessions[0].transform),
        "methods": {
            each.method: {
                "forward_passes": estimate_passes(each.explainer),
                "seed": getattr(each.explainer, "seed", None),
            }
            for each in sessions
        },
        "explanations": list(explanations),
        "failed": dict(failed),
        "packages": versions(),
        "devices": devices(),
    }
    path = folder / "manifest.json"
    write_atomically(path, json.dumps(content, indent=2))
    return path
