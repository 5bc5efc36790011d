"""Explainability vectors as files that stand alone: sparse, of 16 bits, with all that a model needs to take one."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.saved.identity import ROUNDED, Identity, architecture_hash, measure_distances, sketch_weights
from explainers.saved.weights import check_forms, check_identity, quote, read_header, read_weights, save_weights
from explainers.share.catalogue import VECTOR, VECTOR_COMMANDS, Catalogue, list_shipped, shipped
from explainers.training.state_dicts import State
from explainers.vectors.fixed_head import READING, check_reading
from explainers.vectors.model_files import read_model
from explainers.vectors.task_arithmetic import keep_largest, select_learned, vector

KIND = "ExplainabilityVector"

HEADER = {
    "class": KIND,
    "model": "text",
    "architecture_sha256": "SHA-256",
    "sketch": "numbers",
    "head": READING | {"patch_scale": "positive number", "read_out": "numbers|none"},
    "lambda_2": "number",
    "absent": "texts",
}
"""What the header of such a file has; `absent` are the weights that the vector does not change."""

PARTS = {"values": "F16", "bits": "U8"}
"""The two tensors of each weight that a vector changes, and their types."""

TUNED = {"matrices": 0.5}
"""Largest distance of fine-tuned weights from those of the base model, relative to their size.

Fine-tuning moved ViT-Tiny by 0.002 to 0.016. DeiT-Tiny, of the same architecture and trained apart, is at 1.5."""


def available() -> Catalogue:
    """List the explainability vectors that are shipped with this package, by the names of their base models.

    >>> isinstance(available(), list)
    True
    """
    return list_shipped(VECTOR_COMMANDS, VECTOR)


def pack(tau: State) -> dict[str, Tensor]:
    """Keep the largest half of a vector, as float16: `<name>.values`, and `<name>.bits` with a bit for every entry."""
    packed = {}
    for name, value in keep_largest(tau, share=0.5).items():
        flat = value.cpu().flatten()
        if flat.any():
            packed[f"{name}.values"] = flat[flat != 0].half()
            packed[f"{name}.bits"] = torch.from_numpy(np.packbits((flat != 0).numpy()))
    return packed


def unpack(packed: State, like: State, file: str | Path) -> dict[str, Tensor]:
    """The vector in the tensors of `pack`, float32, for a state dict of the shapes of `like`: 0 where nothing was kept.

    Raises:
        InputError: if tensors do not fit, as those of positions do not fit a model of images of another size.
    """
    tau = {name: torch.zeros(value.shape, dtype=torch.float32) for name, value in select_learned(like).items()}
    for name, value in tau.items():
        if f"{name}.bits" not in packed:
            continue
        bits, values, count = packed[f"{name}.bits"], packed[f"{name}.values"], value.numel()
        kept = torch.from_numpy(np.unpackbits(bits.numpy())).bool()
        if len(bits) != -(-count // 8) or kept[count:].any() or kept.sum() != len(values):
            raise InputError(
                f"{file}: expected changes of {name} of the model's shape {list(value.shape)}, got another size: give"
                " a model of the image size at which the vector was learned, or another vector"
            )
        value.view(-1)[kept[:count]] = values.float()
    return tau


def save_vector(trained: str | Path, base: TargetModel, path: Path, lambda_2: float) -> Path:
    """Write the vector of a self-explaining model that was trained from a base model, to a file that stands alone.

    Args:
        trained: `model.safetensors` of the self-explaining model.
        base: the base model.
        path: the file to write.
        lambda_2: the λ₂ to recommend.
    """
    model, own = read_model(trained, base), base.backbone_identity()
    check_identity(model.identity, {"base_sha256": own["backbone_sha256"]}, trained)
    packed = pack(vector(model.backbone, base.backbone.state_dict()))
    header = {
        "class": KIND,
        "model": model.identity["model"],
        "target": own,
        "architecture_sha256": architecture_hash(base.backbone, sized=False),
        "sketch": sketch_weights(base.backbone, sized=False),
        "grid": model.identity["grid"],
        "head": model.head.describe_reading(),
        "lambda_2": lambda_2,
        "absent": [name for name in select_learned(base.backbone.state_dict()) if f"{name}.bits" not in packed],
    }
    return save_weights(packed, path, header)


def find_vector(name: str | Path, target: TargetModel, limits: Mapping[str, float] = ROUNDED) -> tuple[Path, Identity]:
    """Find the vector for a model, and read what its file says.

    Args:
        name: `shipped`, for any that is shipped; the name of the base model of one; or a file that `save_vector` wrote.
        target: the model: the base model up to rounding and the size of its images, or as near as `limits`.
        limits: largest relative distances of the weights, see `measure_distances`.

    Raises:
        InputError: if there is none.
    """
    entries = available()
    if not isinstance(name, str | Path):
        raise InputError(f"vector={quote(name)}: expected shipped, the name of a base model, or a file")
    if os.path.isfile(name):
        files = [Path(name)]
    else:
        known = entries if name == "shipped" else [shipped(str(name), entries)]
        files = [each.folder / VECTOR for each in known if each is not None]
    architecture, reasons = architecture_hash(target.backbone, sized=False), []
    for file in files:
        header = read_header(file, "a vector", HEADER)
        if header["architecture_sha256"] != architecture:
            reasons.append(f"the architecture is not that of {header['model']}")
            continue
        distances = measure_distances(target.backbone, header["sketch"], sized=False)
        if all(distances[kind] <= limit for kind, limit in limits.items()):
            check_reading(header["head"], target, file)
            return file, header
        far = max(distances[kind] for kind in limits)
        origin = "" if limits is ROUNDED else "fine-tuned from "
        reasons.append(f"the weights are not {origin}those of {header['model']}, at a relative distance of {far:.2g}")
    reason = "; ".join(reasons) or ("none is shipped" if name == "shipped" else "there is no such vector")
    raise InputError(
        f"vector={name} does not fit {target.timm_name}: {reason}; train one for its base model"
        f" with `{VECTOR_COMMANDS['vector'].format(model=target.name)}`, and give its file"
    )


def read_vector(file: Path, target: TargetModel) -> dict[str, Tensor]:
    """Read the vector in a file for the weights of a model, whose device it gets."""
    state = target.backbone.state_dict()
    header, packed = read_weights(file, "a vector", HEADER)
    changed = [name for name in select_learned(state) if name not in header["absent"]]
    check_forms(file, {f"{name}.{each}": f"{kind} {name}.{each}" for name in changed for each, kind in PARTS.items()})
    if not packed:
        raise InputError(f"{file}: expected a vector that changes weights, got one without any: give another file")
    tau = unpack(packed, state, file)
    return {name: value.to(target.mean.device) for name, value in tau.items()}
