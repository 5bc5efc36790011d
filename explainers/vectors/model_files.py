"""What the file of a self-explaining model holds, how it is read, and the checks before a transfer."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explainers.errors import InputError, check_distinct
from explainers.models import TargetModel
from explainers.models.heads import COSINES, check_count
from explainers.models.scores import Score
from explainers.saved.identity import Identity, architecture_hash, first_difference, weights_hash
from explainers.saved.weights import (
    check_forms,
    check_identity,
    check_keys,
    describe_tensors,
    read_header,
    read_weights,
)
from explainers.training.state_dicts import State, part
from explainers.vectors.fixed_head import READING, FixedHead, check_reading
from explainers.vectors.task_arithmetic import cosine, vector

TRANSFERRED = "transferred"
"""Value of `alpha` in the file of a model that was made by arithmetic instead of training."""

KIND = "a self-explaining model"

HEADER = {
    "class": "SelfExplaining",
    "target": {"backbone": "text", "backbone_sha256": "SHA-256"},
    "classes": "texts",
    "base_sha256": "SHA-256",
    "alpha": f"{TRANSFERRED}|positive number",
    "head": READING | {"normalise": "boolean"},
}
"""What the header of the file of a self-explaining model has."""


def exported_target(model: TargetModel | nn.Module, head: str | Path, score: Score | None = None) -> TargetModel:
    """Load the model that a `SelfExplaining` exported, with its fixed head.

    Args:
        model: a target or a timm model of the same architecture.
        head: the `model.safetensors` of the export.
        score: what the logits of a timm model mean, see `TargetModel`; a target has its own.
    """
    target = copy.deepcopy(model) if isinstance(model, TargetModel) else TargetModel(model, nn.Identity(), score)
    identity, weights = read_model(head, target)
    own = target.backbone_identity()
    check_identity(identity["target"], {key: own[key] for key in own if key != "backbone_sha256"}, head)
    target.backbone.load_state_dict(part(weights, "backbone"))
    target.head = _fixed_head(identity, weights)
    target.classes = identity["classes"]
    return target.eval()


def read_model(path: str | Path, target: TargetModel) -> tuple[Identity, State]:
    """Read the identity and the weights of a self-explaining model with the backbone of a target."""
    identity, weights = read_weights(path, KIND, HEADER)
    head = {f"head.{name}": form for name, form in COSINES.items()}
    head |= {"head.patch_scale": "floats", "head.read_out?": "floats W"}
    check_forms(path, describe_tensors(target.backbone.state_dict(), "backbone.") | head)
    width = weights.get("head.projection", weights["head.weight"]).shape[1]
    if width != target.embed_dim:
        raise InputError(f"{path}: expected a head for width {target.embed_dim}, got {width}: give another file")
    check_count(identity["classes"], len(weights["head.weight"]), path)
    check_keys({"scale": weights["head.scale"].item()}, {"scale": "positive number"}, path, "head.")
    check_reading(identity["head"] | {"read_out": weights.get("head.read_out", torch.zeros(0)).tolist()}, target, path)
    return identity, weights


def _fixed_head(identity: Identity, weights: State) -> FixedHead:
    """Build the head from the identity and the weights in a file."""
    head: dict[str, Any] = part(weights, "head")
    head |= {name: head[name].item() for name in ("scale", "patch_scale")}
    return FixedHead(**head, **{name: identity["head"][name] for name in ("normalise", "reading", "blocks")})


@dataclass(frozen=True)
class Parent:
    """A model that a transferred model is computed from.

    Attributes:
        weights: state dict of the backbone.
        sha256: hash of these weights.
        head: identity of what computes logits from embeddings, and names of the classes.
    """

    weights: State
    sha256: str
    head: Identity


Sources = dict[str, tuple[str | None, str]]
"""What follows the roles of a source in names, nothing or `_1`, `_2`, ... → its predicting and its explaining file."""


def list_sources(predicting: str | Sequence[str | None] | None, explaining: str | Sequence[str]) -> Sources:
    """List the sources of a transfer, one or several, for the same arguments of `ExplainabilityVector`.

    >>> list_sources(None, "a.safetensors")
    {'': (None, 'a.safetensors')}
    >>> list_sources([None, "b"], ["a*", "b*"])
    {'_1': (None, 'a*'), '_2': ('b', 'b*')}

    Raises:
        InputError: if there are not as many predicting as explaining models, or a model is given twice.
    """
    if isinstance(explaining, str) and (predicting is None or isinstance(predicting, str)):
        return {"": (predicting, explaining)}
    with_attributions = [explaining] if isinstance(explaining, str) else list(explaining)
    without = [predicting] if predicting is None or isinstance(predicting, str) else list(predicting)
    if len(without) != len(with_attributions):
        raise InputError(
            "expected as many models in module.predicting as in module.explaining (null: the base model), got"
            f" {len(without)} and {len(with_attributions)}"
        )
    check_distinct(**{"module.explaining": with_attributions})
    return {f"_{i}": pair for i, pair in enumerate(zip(without, with_attributions, strict=True), 1)}


def read_parents(target: TargetModel, sources: Sources, onto: str) -> dict[str, Parent]:
    """Read the models of a transfer, and check that arithmetic on their weights has a meaning.

    Returns:
        The models by role: `base` (`target`), `predicting` if there is one, `explaining` and `onto`; of several sources
        `predicting_1` and so on.

    Raises:
        InputError: if a file does not fit its role or the base model, or the models of a source have two heads.
    """
    parents = {"base": Parent(target.backbone.state_dict(), weights_hash(target.backbone), {})}
    for name, (predicting, explaining) in sources.items():
        if predicting is not None:
            parents[f"predicting{name}"] = _read_parent("predicting", predicting, target)
        parents[f"explaining{name}"] = _read_parent("explaining", explaining, target)
        if predicting is None:
            continue
        difference = first_difference(parents[f"predicting{name}"].head, parents[f"explaining{name}"].head)
        if difference is not None:
            raise InputError(
                f"expected predicting and explaining models of one task with one head, got a difference in {difference}"
                f" between {predicting} and {explaining}: train the explaining one from the predicting one's head"
            )
    return parents | {"onto": _read_parent("onto", onto, target)}


def read_head(paths: Sequence[str], target: TargetModel) -> FixedHead:
    """The head of a self-explaining model; of several, which read patches alike, with the means of their factors."""
    heads = [_fixed_head(*read_model(path, target)) for path in paths]
    first, readings = heads[0], [f"{head.reading}{' and paths' if head.blocks else ''}" for head in heads]
    for head, path, reading in zip(heads, paths, readings, strict=True):
        if (head.reading, head.blocks) != (first.reading, first.blocks):
            raise InputError(
                f"expected models that read patches alike in module.explaining, got {readings[0]} in {paths[0]} and"
                f" {reading} in {path}: train them with one module.reading and module.path_blocks"
            )
    first.patch_scale.copy_(torch.stack([head.patch_scale for head in heads]).mean())
    weights: list[torch.Tensor] = [head.read_out for head in heads if head.read_out is not None]
    first.read_paths(first.blocks, torch.stack(weights).mean(0) if weights else None)
    return first


def compute_vectors(parents: dict[str, Parent], sources: Sources) -> tuple[list[State], dict[str, float]]:
    """Compute the vectors τ_m of the sources, and the cosines of their task vectors with the target's.

    A cosine is named `cosine`, or of several sources `cosine_1` and so on; it needs a predicting model.
    """
    base = parents["base"].weights
    vectors: list[State] = []
    cosines = {}
    for name, (predicting, _) in sources.items():
        source = base if predicting is None else parents[f"predicting{name}"].weights
        vectors.append(vector(parents[f"explaining{name}"].weights, source))
        if predicting is not None:
            cosines[f"cosine{name}"] = cosine(vector(source, base), vector(parents["onto"].weights, base))
    return vectors, cosines


def _read_parent(role: str, path: str, target: TargetModel) -> Parent:
    """Read a model from a file, and check that it was trained from the base model, as its role requires."""
    identity = read_header(path, KIND, HEADER)
    model, alpha = identity["target"], identity["alpha"]
    if model["backbone"] != target.name:
        raise InputError(f"expected a {target.name} for module.{role}, got {model['backbone']} in {path}")
    if alpha == TRANSFERRED:
        raise InputError(f"expected for module.{role} a model that was trained, got a transferred one in {path}")
    if (alpha < 1) != (role == "explaining"):
        raise InputError(
            f"expected for module.{role} a model trained {'with' if role == 'explaining' else 'without'}"
            f" attributions, got alpha={alpha} in {path}: are predicting and explaining swapped?"
        )
    base_hash = weights_hash(target.backbone)
    if identity["base_sha256"] != base_hash:
        raise InputError(
            f"expected for module.{role} a model fine-tuned from the base model (SHA-256 {base_hash[:12]}), got one"
            f" from another base model ({identity['base_sha256'][:12]}) in {path}"
        )
    _, weights = read_model(path, target)
    fixed = _fixed_head(identity, weights)
    fixed.read_as({"reading": "patch", "patch_scale": 1, "blocks": ()})  # how patches are read changes no logit
    head = {
        "num_classes": fixed.out_features,
        "head_architecture_sha256": architecture_hash(fixed),
        "head_sha256": weights_hash(fixed),
        "classes": identity["classes"],
    }
    return Parent(part(weights, "backbone"), model["backbone_sha256"], head)
