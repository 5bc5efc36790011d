"""Methods by their names, as `eval.py methods=[GAE,DecompX-SkipPLUS]` takes them."""

import difflib
import importlib
import inspect
import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, get_type_hints

from torch import nn

from explainers.errors import InputError, UnsupportedModel, check_distinct, check_types
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.layerwise import Layerwise, Transitions
from explainers.posthoc.propagation import libra

posthoc: Any = importlib.import_module("explainers.posthoc")  # no import statement, because it lists this module


def methods_for(target: TargetModel, grid: PatchGrid | None = None) -> list[str]:
    """List the names of the methods that explain a model, on a grid or on its own.

    >>> import timm
    >>> methods_for(TargetModel(timm.create_model("test_resnet", num_classes=2)))[:4]
    ['CAM', 'Chance', 'DeepLift', 'ElementWiseCAM']
    """
    return list(build_supported(target, grid))


def build_supported(target: TargetModel, grid: PatchGrid | None = None) -> dict[str, nn.Module]:
    """Build all methods that explain a model: name → method. A method says what a model lacks when it is built."""
    grid, built = grid or target.grid, {}
    for method in posthoc.method_names():
        with suppress(InputError):
            built[method] = _build(method, target, grid)
    return built


def build(method: str, target: TargetModel, grid: PatchGrid, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a method by its name.

    Args:
        method: name of a class of this room, such as `GAE`. A method of plain gradients can have the prefix `Libra`,
            see `propagation.libra`: `LibraXGradCAM`. A layerwise method can be followed by an aggregation, as in the
            figures of SkipPLUS: `DecompX-PLUS`, `LibraXGradCAM-PLUS`, `DecompX-SkipPLUS`, `ALTI-Rollout`.
        target: the model to explain.
        grid: the patches that are explained.
        options: keyword arguments of the method's class, and of the aggregation: `start` of PLUS and Rollout.

    Raises:
        InputError: if the method, the aggregation or an option does not exist.
        UnsupportedModel: if the model lacks what the method needs; the message lists methods that explain it.
    """
    try:
        return _build(method, target, grid, options)
    except UnsupportedModel as error:
        possible = [name for name in methods_for(target, grid) if name != "Chance"]
        raise UnsupportedModel(f"{error.wanted} for {method}", error.got, f"one of {', '.join(possible)}") from error


def _build(method: str, target: TargetModel, grid: PatchGrid, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a method; an UnsupportedModel has the method's own recommendation."""
    name, _, aggregation = method.partition("-")
    kind, options = _find_class(name), dict(options or {})
    _check_aggregation(kind, aggregation)
    _check_options(kind, options, aggregation)
    of_aggregation = {key: options.pop(key) for key in _aggregation_options(aggregation) if key in options}
    plain = partial(kind, **options)
    of = plain if name == kind.__name__ else libra(plain)
    if not aggregation:
        return of(target=target, grid=grid)
    return getattr(posthoc, aggregation)(target, grid, of, **of_aggregation)


def _find_class(name: str) -> Any:
    """Return the class with this name, which can have the prefix `Libra`."""
    names, plain = posthoc.method_names(), name.removeprefix("Libra")
    if name in names:
        return getattr(posthoc, name)
    if plain not in names:
        by_small_letters = {known.lower(): known for known in names}
        close = [by_small_letters[each] for each in difflib.get_close_matches(name.lower(), by_small_letters, 3)]
        hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(names)}"
        raise InputError(f"expected a method of explainers.posthoc, got {name}: {hint}")
    return getattr(posthoc, plain)


def _check_aggregation(kind: type, aggregation: str) -> None:
    if not aggregation:
        return
    if aggregation not in posthoc.AGGREGATIONS:
        raise InputError(f"expected one of the aggregations {', '.join(posthoc.AGGREGATIONS)}, got {aggregation}")
    rollout = aggregation == "Rollout"
    if not issubclass(kind, Transitions if rollout else Layerwise):
        layer, example = ("a matrix", "GenAtt") if rollout else ("a map", "DecompX")
        raise InputError(
            f"{aggregation} needs a method that gives {layer} for each layer, such as {example}; {kind.__name__} does"
            " not"
        )


def _check_options(kind: Any, options: Mapping[str, Any], aggregation: str) -> None:
    """Raise an InputError for an option that a method does not have, or whose value is of another kind."""
    if not options:
        return
    hints, known = get_type_hints(kind.__init__), list(inspect.signature(kind).parameters)[2:]
    if aggregation:
        hints |= get_type_hints(getattr(posthoc, aggregation).__init__)
        known = [option for option in known if option not in kind.layer_options] + _aggregation_options(aggregation)
    name = f"{kind.__name__}-{aggregation}".rstrip("-")
    for option in options:
        if option not in known:
            raise InputError(f"{name} has no option {option}; it has {', '.join(known) or 'none'}")
    check_types(options, hints)


def find_passes_option(method: str) -> str | None:
    """Return the option that sets the number of forward passes of a method by its name, such as masks of RISE."""
    options = inspect.signature(_find_class(method.partition("-")[0])).parameters
    return next((option for option in ("masks", "samples", "steps") if option in options), None)


def _aggregation_options(aggregation: str) -> list[str]:
    """List the options of an aggregation by its name, which "" is for none."""
    return list(inspect.signature(getattr(posthoc, aggregation)).parameters)[3:] if aggregation else []


def label_methods(methods: Sequence[Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Label every entry of a list of methods with its name and its options: label → name, options.

    An entry is a name, or a dictionary of one name and its options. An option with a list of values gives one method
    for each value. An InputError refuses other entries, and entries with the same label.

    >>> label_methods(["GAE", {"TokenTM": {"scale": "softmax"}}])
    {'GAE': ('GAE', {}), 'TokenTM(scale=softmax)': ('TokenTM', {'scale': 'softmax'})}
    >>> list(label_methods([{"DecompX-PLUS": {"start": [0, 6]}}]))
    ['DecompX-PLUS(start=0)', 'DecompX-PLUS(start=6)']
    """
    if isinstance(methods, str) or not all(_is_entry(entry) for entry in methods):
        raise InputError(
            "expected methods as a list of names, such as methods=[GAE], or"
            f" methods=[{{RISE:{{masks:500}}}}] with options, got {methods}"
        )
    named = [next(iter(entry.items())) if isinstance(entry, Mapping) else (entry, {}) for entry in methods]
    entries = [(name, options) for name, given in named for options in _list_combinations(given)]
    chosen = [", ".join(f"{key}={value}" for key, value in options.items()) for _, options in entries]
    labels = [f"{name}({options})" if options else name for (name, _), options in zip(entries, chosen, strict=True)]
    check_distinct(methods=labels)
    return dict(zip(labels, entries, strict=True))


def _list_combinations(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the combinations of options with lists of values."""
    lists = [isinstance(value, Sequence) and not isinstance(value, str) for value in options.values()]
    values = [value if several else [value] for several, value in zip(lists, options.values(), strict=True)]
    return [dict(zip(options, chosen, strict=True)) for chosen in itertools.product(*values)]


def _is_entry(entry: Any) -> bool:
    """Whether an entry of a list of methods is a name, or a dictionary of one name and its options."""
    return isinstance(entry, str) or (
        isinstance(entry, Mapping) and len(entry) == 1 and isinstance(next(iter(entry.values())), Mapping)
    )


def build_all(
    methods: Sequence[Any], target: TargetModel, grid: PatchGrid, only: Collection[str] | None = None
) -> dict[str, nn.Module]:
    """Build methods: label → method, see `label_methods`. `only` restricts them to these labels."""
    chosen = {label: parts for label, parts in label_methods(methods).items() if only is None or label in only}
    return {label: build(name, target, grid, options) for label, (name, options) in chosen.items()}
