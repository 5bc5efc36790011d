"""Where explainability vectors come from: models of source tasks, or files that stand alone.

Such a file is sparse, of 16 bits, and has all that a model needs to take the vector.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from explainers.errors import InputError, check_distinct
from explainers.models import TargetModel
from explainers.saved.identity import (
    ROUNDED,
    Identity,
    architecture_hash,
    measure_distances,
    sketch_weights,
    weights_hash,
)
from explainers.saved.weights import State, check_forms, check_identity, quote, read_header, read_weights, save_weights
from explainers.share.catalogue import VECTOR, VECTOR_COMMANDS, Catalogue, list_shipped, shipped
from explainers.vectors.fixed_head import READING, check_reading
from explainers.vectors.model_files import TRANSFERRED, SavedModel, read_model
from explainers.vectors.task_arithmetic import combine, cosine, keep_largest, select_learned, subtract

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
    packed = pack(subtract(model.backbone, base.backbone.state_dict()))
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


@dataclass(frozen=True)
class VectorSources:
    """The files of a vector: of models of one or several source tasks, see `SelfExplaining.export`, or of its own.

    Attributes:
        explaining: files of the models θ_ft*, trained with attributions. The transferred model reads its patches as
            they do; they read patches alike, and the mean of their factors of attributions is used.
        predicting: files of the models θ_ft of the same tasks, trained without attributions; `None` in place of one
            that is the base model itself, with its own head. The vector of a task is τ_m = θ_ft* − θ_ft.
        ratios: r_m, the weight of each vector in their sum; `None`: all are 1.
        file: `shipped`, for the vector that is shipped for the base model, or the file of one, see `save_vector`; the
            others have no effect then.
    """

    explaining: Sequence[str] = ()
    predicting: Sequence[str | None] | None = None
    ratios: Sequence[float] | None = None
    file: str | None = None


@dataclass(frozen=True)
class SourceVector:
    """A vector, and what is known of it.

    Attributes:
        tau: Σ_m r_m τ_m, a difference of weights.
        reading: how patches are read, see `FixedHead.read_as`.
        hashes: role of a model, or `vector` → hash.
        cosines: `cosine`, or of several sources `cosine_1` and so on → the cosine of the task vectors of a source and
            of the target; a source without a predicting model has none.
    """

    tau: State
    reading: Identity
    hashes: dict[str, str]
    cosines: dict[str, float]


def build_vector(sources: VectorSources, base: TargetModel, onto: State) -> SourceVector:
    """Compute the vector of the sources, or read it; an InputError if a file does not fit its role or the base model.

    Args:
        sources: the files.
        base: the base model.
        onto: weights of the target task's model.
    """
    if sources.file is not None:
        file, header = find_vector(sources.file, base)
        hashes = {"vector": hashlib.sha256(file.read_bytes()).hexdigest()}
        return SourceVector(read_vector(file, base), header["head"], hashes, {})
    start = base.backbone.state_dict()
    vectors, readings, hashes, cosines = [], {}, {}, {}
    for suffix, predicting, explaining in list_sources(sources):
        learned, source = read_parent("explaining", explaining, base), start
        if predicting is not None:
            before = read_parent("predicting", predicting, base)
            check_identity(describe_head(learned), describe_head(before), explaining)
            source, hashes[f"predicting{suffix}"] = before.backbone, before.identity["target"]["backbone_sha256"]
            cosines[f"cosine{suffix}"] = cosine(subtract(source, start), subtract(onto, start))
        hashes[f"explaining{suffix}"] = learned.identity["target"]["backbone_sha256"]
        vectors.append(subtract(learned.backbone, source))
        readings[explaining] = learned.head.describe_reading()
    ratios = [1.0] * len(vectors) if sources.ratios is None else sources.ratios
    return SourceVector(combine(vectors, ratios), merge_readings(readings), hashes, cosines)


def list_sources(sources: VectorSources) -> list[tuple[str, str | None, str]]:
    """List what follows the roles of each source in names, nothing or `_1`, ..., its predicting and explaining file.

    >>> list_sources(VectorSources(["a*"]))
    [('', None, 'a*')]
    >>> list_sources(VectorSources(["a*", "b*"], [None, "b"]))
    [('_1', None, 'a*'), ('_2', 'b', 'b*')]
    """
    count = len(sources.explaining)
    predicting = [None] * count if sources.predicting is None else sources.predicting
    lengths = {len(predicting), count, count if sources.ratios is None else len(sources.ratios)}
    if lengths != {count} or not count:
        raise InputError(
            "expected lists of one length, got"
            f" explaining={sources.explaining}, predicting={sources.predicting}, ratios={sources.ratios}",
            *("explaining", "predicting", "ratios"),
        )
    check_distinct(explaining=sources.explaining)
    suffixes = [f"_{number}" for number in range(1, count + 1)] if count > 1 else [""]
    return list(zip(suffixes, predicting, sources.explaining, strict=True))


def read_parent(role: str, path: str, base: TargetModel) -> SavedModel:
    """Read a model from a file, and check that it was trained from the base model, as its role requires."""
    model = read_model(path, base)
    check_identity(model.identity, {"base_sha256": weights_hash(base.backbone)}, path)
    alpha, wanted = model.identity["alpha"], "with" if role == "explaining" else "without"
    learned = "with" if alpha != TRANSFERRED and alpha < 1 else "without"
    if alpha == TRANSFERRED or learned != wanted:
        swapped = "" if role == "onto" else ": are predicting and explaining swapped?"
        got = f"alpha={alpha} in {path}{swapped}"
        raise InputError(f"expected for {role}= a model trained {wanted} attributions, got {got}", role)
    return model


def describe_head(model: SavedModel) -> Identity:
    """The head of a model without the way in which it reads patches, which changes no logit."""
    head = model.head.read_as("patch", 1.0)
    about = {"num_classes": head.out_features, "normalise": head.normalise, "head_sha256": weights_hash(head)}
    return about | {"classes": model.identity["classes"]}


def merge_readings(readings: dict[str, Identity]) -> Identity:
    """How models, file → reading, read patches; an InputError unless they do alike: with the means of their factors."""
    first = next(iter(readings.values()))
    for path, reading in readings.items():
        check_identity(reading, {name: first[name] for name in ("reading", "blocks")}, path)
    count = len(readings)
    scale = sum(reading["patch_scale"] for reading in readings.values()) / count
    columns = zip(*(reading["read_out"] or () for reading in readings.values()), strict=True)
    return first | {"patch_scale": scale, "read_out": [sum(column) / count for column in columns] or None}
