"""Methods by their names, as `eval.py methods=[GAE,DecompX-SkipPLUS]` takes them."""

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.posthoc.layerwise import PLUS, Aggregation, Layerwise, Rollout, SkipPLUS, Transitions
from explainers.target import TargetModel

AGGREGATIONS: dict[str, type[Aggregation]] = {"PLUS": PLUS, "SkipPLUS": SkipPLUS, "Rollout": Rollout}


def method_names() -> list[str]:
    """List the names of all methods: the classes that this room exports, without the aggregations."""
    room = importlib.import_module(__package__)
    classes = [name for name in room.__all__ if inspect.isclass(getattr(room, name))]
    return sorted(set(classes) - set(AGGREGATIONS))


def build(method: str, target: TargetModel, grid: PatchGrid, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a method by its name.

    Args:
        method: name of a class of this room, such as `GAE`. A layerwise method can be followed by an aggregation, as in
            the figures of SkipPLUS: `DecompX-PLUS`, `DecompX-SkipPLUS`, `ALTI-Rollout`.
        target: the model to explain.
        grid: the patches that are explained.
        options: arguments of the method.

    Raises:
        InputError: for names, aggregations and options that do not exist.

    >>> import timm
    >>> target = TargetModel(timm.create_model("test_vit", num_classes=2))
    >>> type(build("DecompX-SkipPLUS", target, PatchGrid(160, 16))).__name__
    'SkipPLUS'
    """
    name, _, aggregation = method.partition("-")
    if name not in method_names():
        close = difflib.get_close_matches(name, method_names(), 3) or method_names()
        raise InputError(f"expected a method of explainers.posthoc, got {name}: did you mean {', '.join(close)}?")
    if aggregation and aggregation not in AGGREGATIONS:
        raise InputError(f"expected an aggregation {', '.join(AGGREGATIONS)}, got {method}")
    found = getattr(importlib.import_module(__package__), name)
    needed = Transitions if aggregation == "Rollout" else Layerwise
    if aggregation and not issubclass(found, needed):
        needs = "a matrix" if aggregation == "Rollout" else "a map"
        raise InputError(
            f"{aggregation} needs a method that gives {needs} for each layer, such as "
            f"{'GenAtt' if aggregation == 'Rollout' else 'DecompX'}; {name} gives none"
        )
    known = inspect.signature(found).parameters
    if unknown := [option for option in options or {} if option not in known]:
        raise InputError(f"{name} has no option {unknown[0]}; it has {', '.join(list(known)[2:]) or 'none'}")

    def of(target: TargetModel, grid: PatchGrid) -> Any:
        return found(target=target, grid=grid, **(options or {}))

    return AGGREGATIONS[aggregation](target, grid, of) if aggregation else of(target, grid)


def build_all(methods: list[Any], target: TargetModel, grid: PatchGrid) -> dict[str, nn.Module]:
    """Build a list of methods, each a name, or a dictionary of one name and its options.

    Returns:
        Label → method. The label is the name, with the options if there are any: `TokenTM(scale=softmax)`.
    """
    built = {}
    for entry in methods:
        name, options = next(iter(entry.items())) if isinstance(entry, Mapping) else (entry, {})
        # A dot separates modules in PyTorch
        chosen = ", ".join(f"{key}={value}" for key, value in options.items()).replace(".", "·")
        label = f"{name}({chosen})" if chosen else name
        built[label] = build(name, target, grid, options)
    return built
