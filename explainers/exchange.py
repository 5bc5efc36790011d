"""Weights on their way to a file and back: a trained network takes along what it belongs to, a frozen target stays."""

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from timm.models import load_checkpoint
from torch import Tensor, nn

from explainers.target import DistilledHead, TargetModel


def save_network(network: nn.Module, path: Path, identity: Mapping[str, str]) -> Path:
    """Write the weights of a network, and what they belong to as metadata, as a safetensors file."""
    return save_state(network.state_dict(), path, identity)


def save_state(state: Mapping[str, Tensor], path: Path, identity: Mapping[str, str]) -> Path:
    """Write a state dict like the weights of a network: see `save_network`."""
    save_file(_on_cpu(state), path, metadata=dict(identity))
    return path


def read_network(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What `save_network` wrote: the identity and the weights.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: if it is something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no trained explainer at {path}: train one with train.py, or give another path")
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"expected a safetensors file of weights at {path}, got something else: {error}") from error


def check_identity(saved: Mapping[str, str], own: Mapping[str, str], path: str, wanted: Mapping[str, str]) -> None:
    """Compare what a file belongs to with what it is loaded for.

    Args:
        wanted: the keys that have to be equal, each with the words that stand before its value.

    Raises:
        ValueError: names the first key that differs, with both values.
    """
    for key, what in wanted.items():
        if saved.get(key) != own[key]:
            raise ValueError(
                f"{path} explains {saved.get('backbone')} with {what} {saved.get(key)}; "
                f"this target, {own['backbone']}, has {own[key]}"
            )


def part(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Of a state dict what belongs to a submodule, under the names that it has there."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def without_part(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """A state dict less one submodule: what a checkpoint holds of a module with a frozen target."""
    return {name: value for name, value in state.items() if not name.startswith(f"{part}.")}


def with_part(state: Mapping[str, Tensor], part: str, module: nn.Module) -> dict[str, Tensor]:
    """The inverse of `without_part`: what Lightning wants to find in a checkpoint."""
    return dict(state) | {f"{part}.{name}": value for name, value in module.state_dict().items()}


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of a module's weights and their names."""
    return hashlib.sha256(save(_on_cpu(module.state_dict()))).hexdigest()


def copy_target(target: TargetModel) -> TargetModel:
    """A target with weights of its own, to train or to keep."""
    copied = copy.deepcopy(target)
    vars(copied.backbone).pop("forward_features", None)  # a compiled one would go on reading the original's weights
    return copied


def save_target(target: TargetModel, path: Path) -> None:
    """Write backbone and head as one safetensors file, which timm loads as a checkpoint of the backbone's model."""
    weights, head = target.backbone.state_dict(), target.head
    names = target.backbone.pretrained_cfg["classifier"]
    names = (names,) if isinstance(names, str) else names
    if isinstance(head, DistilledHead):
        parts: list[Any] = [(part.weight, part.bias) for part in (head.head, head.head_dist)]
    else:  # of a distilled DeiT's two classifiers timm takes the mean
        parts = [(weight * len(names), head.bias) for weight in head.weight.chunk(len(names), -1)]
    for name, (weight, bias) in zip(names, parts, strict=True):
        weights |= {f"{name}.weight": weight, f"{name}.bias": bias.clone()}
    save_file(_on_cpu(weights), path)


def load_target(target: TargetModel, path: str | Path) -> TargetModel:
    """A model like `target`, with the weights of backbone and head that `save_target` wrote.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: if the file belongs to another model, or to another number of classes.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model at {path}: train one with train.py, or give another path")
    model = copy_target(target).backbone
    model.reset_classifier(target.num_classes)
    try:
        load_checkpoint(model, str(path))
    except RuntimeError as error:
        raise ValueError(
            f"expected weights of {target.name} for {target.num_classes} classes in {path}, got others: "
            f"{str(error).splitlines()[-1].strip()}"
        ) from error
    return TargetModel(model).eval()


def _on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}
