"""The models that an explainability vector is computed from, and the checks that arithmetic on them has a meaning."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from explainers.errors import InputError, check_distinct
from explainers.models import TargetModel
from explainers.saved.identity import Identity, weights_hash
from explainers.saved.weights import check_identity, read_header
from explainers.training.state_dicts import State
from explainers.vectors.model_files import HEADER, KIND, TRANSFERRED, SavedModel, read_model
from explainers.vectors.task_arithmetic import combine, cosine, vector
from explainers.vectors.vector_files import find_vector, read_vector


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
            cosines[f"cosine{suffix}"] = cosine(vector(source, start), vector(onto, start))
        hashes[f"explaining{suffix}"] = learned.identity["target"]["backbone_sha256"]
        vectors.append(vector(learned.backbone, source))
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
    header = read_header(path, KIND, HEADER)
    wanted = {"backbone": base.name, "base_sha256": weights_hash(base.backbone)}
    check_identity(header["target"] | header, wanted, path)
    alpha = header["alpha"]
    if alpha == TRANSFERRED or (alpha < 1) != (role == "explaining"):
        raise InputError(
            f"expected for {role}= a model trained {'with' if role == 'explaining' else 'without'} attributions, got"
            f" alpha={alpha} in {path}: are predicting and explaining swapped?",
            role,
        )
    return read_model(path, base)


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
