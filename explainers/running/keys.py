"""Checks of a config before anything is built from it: its keys and values, and what a misspelt key may mean."""

import inspect
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError, check_range, fits, meant

OF_PARTS = ("blocks", "direct", "evaluation", "grid")
"""Keys at the top of a config that one group sets for others, which may not read them."""

OF_EXPLAINERS = {
    "blocks": "AnyHead reads explainer.network.blocks, or explainers.anyhead.network.blocks in eval.py",
    "direct": "AnyHead alone reads it",
}
"""Keys at the top that some explainers read → what to say where none does."""

OF_TASKS = ("data", "target", "explainers")
"""Keys of a task in eval.py."""

SHORT = {
    "explainer": "explainers@explainer",
    "labels": "labels@module.labels",
    "projection": "projection@module.projection",
    "teacher": "teacher@module.loss",
}
"""Key of settings that a file has → Hydra's name of the choice of this file."""


def with_groups(words: list[str]) -> list[str]:
    """The words of a command, with Hydra's names of the choices that it makes by `SHORT` ones.

    >>> with_groups(["train.py", "explainer=tve", "explainer.hops=[1]"])
    ['train.py', 'explainers@explainer=tve', 'explainer.hops=[1]']
    """
    result = []
    for word in words:
        key, _, value = word.partition("=")
        names_file = key in SHORT and value[:1].isalpha() and value not in ("null", "None")
        result.append(f"{SHORT[key]}={value}" if names_file else word)
    return result


def check_settings(cfg: DictConfig, program: Path, **own: type) -> None:
    """Raise an InputError for a setting that nothing reads, has a wrong type, or is out of range.

    Args:
        cfg: the config of a run.
        program: the config file of its program, which has the keys that the program reads.
        own: key → type of the settings that the program itself reads.
    """
    check_keys(cfg, program)
    check_types(cfg, "", **own)
    check_precision(cfg.trainer.precision)
    check_range(0, 2**32 - 1, seed=cfg.seed)


def check_keys(cfg: DictConfig, program: Path) -> None:
    """Raise an InputError for a key of a task, or one that the command line adds (+) at the top, if nothing reads it.

    It is also raised for the name of a file in place of its settings, as in module.loss=propagation.

    Deeper keys are arguments of a `_target_`, which refuses unknown ones. Experiments may have keys at the top that
    nothing reads after an override.

    Args:
        cfg: the config of a run.
        program: the config file of its program, which has the keys that the program reads.
    """
    own: Any = OmegaConf.load(program)
    groups = [
        str(group).rpartition("@")[2] for choice in own.defaults if isinstance(choice, DictConfig) for group in choice
    ]
    texts = [OmegaConf.to_yaml(node) for node in (cfg, HydraConfig.get())]
    interpolated = re.findall(r"\$\{(?:[\w.]+:)?\.*(\w+)", " ".join(texts))
    known = [*own, *groups, *OF_PARTS, *interpolated]
    given: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)  # interpolations in them stay
    added = re.findall(r"^\++(\w+)", "\n".join(given), re.MULTILINE)
    places = [text for text in given if re.match(r"\+*data\.(root|train\.roots|val\.roots)=", text)]
    if {"root", "roots"} <= {text.partition("=")[0].rpartition(".")[2] for text in places}:
        raise InputError(f"expected data.root or the roots of each split, got {' and '.join(places)}: leave out one")
    unread = [(key, meant(key, known)) for key in added if key in cfg and key not in known]
    for key, suggestion in OF_EXPLAINERS.items():
        if key not in interpolated and any(text.lstrip("+").startswith(f"{key}=") for text in given):
            unread.append((key, suggestion))
    for name, settings in (cfg.get("tasks") or {}).items():
        unread += [(f"tasks.{name}.{key}", meant(str(key), OF_TASKS)) for key in settings if key not in OF_TASKS]
    for key, suggestion in unread:
        raise InputError(f"no setting {key}: nothing reads it; {suggestion}")
    for group, name in ((str(group), str(group).partition("@")[2]) for group in HydraConfig.get().runtime.choices):
        if name and isinstance(file := OmegaConf.select(cfg, name), str):
            folder = f"configs/{group.partition('@')[0]}"
            raise InputError(f"expected {group}={file}, which names a file in {folder}, got {name}={file}")


def unknown_key(cause: Any, configs: Path) -> str:
    """The message for a key that is not in the config: which program has it, or the most similar keys."""
    node, key, full = cause.parent_node, str(cause.key), str(cause.full_key)
    parent = full.removesuffix(key).rstrip(".")
    if parent in ("explainers", "tasks"):
        return f"no setting {full}: add {key} to {parent}=[...], which has {', '.join(node) or 'none'}"
    owners = [f"{path.stem}.py" for path in configs.glob("*.yaml") if full in dotted_keys(OmegaConf.load(path))]
    if owners:
        return f"no setting {full} in the config of this program: {owners[0]} has it"
    names = sorted({*map(str, node)} | (set() if parent else groups_of(configs)))
    root = OmegaConf.select(node, "." * (len(parent.split(".")) + 1)) if parent else node  # one more for each parent
    everywhere = [name for name in dotted_keys(root) if name.rpartition(".")[2] == key]
    similar = get_close_matches(key.lower(), names, 3, 0.7)  # of the key alone: all siblings share its beginning
    siblings = [f"{parent}.{name}".lstrip(".") for name in (similar or ([] if everywhere else names))]
    return f"no setting {full}: {meant(full, siblings, everywhere)}"


def groups_of(configs: Path) -> set[str]:
    """The groups that the programs choose files of; some, such as `experiment`, are no keys of a config.

    Args:
        configs: folder of the config files.
    """
    files: list[Any] = [OmegaConf.load(path) for path in configs.glob("*.yaml")]
    choices = [choice for file in files for choice in file.defaults if isinstance(choice, DictConfig)]
    return {str(group) for choice in choices for group in choice}


def dotted_keys(cfg: Any) -> list[str]:
    """The dotted keys of a config; an interpolated part has those of its own place."""
    parts: list[tuple[str, Any]] = [("", OmegaConf.to_container(cfg))]
    for path, part in parts:  # which grows
        parts += [(f"{path}.{name}".lstrip("."), value) for name, value in part.items()] if type(part) is dict else []
    return [path for path, _ in parts[1:]]


def check_types(node: DictConfig, place: str = "", **own: type) -> None:
    """Raise an InputError for the first setting whose type differs from the hint of its argument in the `_target_`.

    Only numbers, strings, booleans and lists of them are checked.

    Args:
        node: a config, or a part of one.
        place: the dotted key of the part, with a dot at its end.
        own: key → type of the settings at the top, which the program itself reads.

    >>> check_types(DictConfig({"data": {"_target_": "datamodules.digits.DigitImages", "batch_size": "eight"}}))
    Traceback (most recent call last):
    explainers.errors.InputError: expected data.batch_size of type int, got 'eight'
    """
    given: list[Any] = [name for name in node if not OmegaConf.is_missing(node, str(name))]
    hints, defaults = _arguments(str(node._target_)) if "_target_" in given else (own, {})
    for name in (name for name in hints if name in given and not OmegaConf.is_dict(node[name])):
        value = OmegaConf.to_container(node[name]) if OmegaConf.is_list(node[name]) else node[name]
        if not fits(value, hints[name]) and (value is not None or defaults.get(name, value) is not None):
            hint = hints[name]
            kind = hint.__name__ if isinstance(hint, type) else re.sub(r"(\w+\.)+", "", str(hint))
            kind = kind.replace("Sequence[", "list[").replace("None", "null")
            raise InputError(f"expected {place}{name} of type {kind}, got {value!r}")
    for part in given:
        if not OmegaConf.is_interpolation(node, str(part)) and OmegaConf.is_dict(node[part]):
            check_types(node[part], f"{place}{part}.")


@cache
def _arguments(target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Type hints and default values of the arguments of a `_target_`; none where they cannot be read."""
    try:
        built: Any = get_object(target)
        function = built.__init__ if isinstance(built, type) else built  # type: ignore[misc]
        signature = inspect.signature(function)
        hints = get_type_hints(function)
    except (ImportError, NameError, TypeError, ValueError, HydraException):
        return {}, {}  # building it raises the reason
    return (
        {name: hint for name, hint in hints.items() if name in signature.parameters},
        {name: parameter.default for name, parameter in signature.parameters.items()},
    )


def check_precision(precision: Any) -> None:
    """Raise an InputError for a precision with weights in another type than float32, which images are normalised in.

    >>> check_precision("bf16-mixed")
    """
    if str(precision) not in ("32-true", "32", "bf16-mixed", "bf16", "16-mixed", "16"):
        raise InputError(
            f"expected trainer.precision 32-true, bf16-mixed or 16-mixed, got {precision}: weights have to be in"
            " float32, because images are normalised in it"
        )
