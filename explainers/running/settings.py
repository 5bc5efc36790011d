"""A config before anything is built from it: checks of its keys and values, and what `weights` stands for."""

import inspect
import os
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from explainers.errors import InputError, check_range, fits, suggest_names
from explainers.saved.files import is_first_process
from explainers.saved.records import leaves

SHARED_KEYS = ("blocks", "direct", "evaluation", "grid")
"""Keys at the top of a config. One group sets them and others read them, or none does."""

TASK_KEYS = ("data", "target", "explainers")
"""Keys of a task in eval.py."""

GROUPS = {
    "explainer": "explainers@explainer",
    "labels": "labels@module.labels",
    "projection": "projection@module.head.projection",
    "teacher": "teacher@module.loss",
}
"""Key of settings that a file has → Hydra's name of the choice of this file."""

PRECISIONS = ("32-true", "32", "bf16-mixed", "bf16", "16-mixed", "16")
"""Lightning's names of precisions with weights in float32."""

CHECKPOINT_PATH = "target.model.checkpoint_path"
"""The setting of timm that `weights` stands for, together with `target.model.pretrained=false`."""


OTHER_KEYS = {"weights": "weights", "image_size": "++target.model.img_size", "grid.differs": "++grid.differs"}
"""Settings of the library that have another name in configs, or that only few configs have."""

SHORT_KEYS = {"lambda_2": "module.lambda_2", "explainer.lambda_2": "module.lambda_2"}
"""Keys of a command → where the settings are."""


def expand_groups(words: list[str]) -> list[str]:
    """The words of a command, with Hydra's names of the choices and keys that it makes by short ones.

    >>> expand_groups(["train.py", "explainer=tve", "explainer.hops=[1]", "lambda_2=0.5,1.0"])
    ['train.py', 'explainers@explainer=tve', 'explainer.hops=[1]', 'module.lambda_2=0.5,1.0']
    """
    result = []
    for word in words:
        key, is_setting, value = word.partition("=")
        names_file = key in GROUPS and value[:1].isalpha() and value not in ("null", "None")
        key = GROUPS[key] if names_file else SHORT_KEYS.get(key, key)
        result.append(f"{key}{is_setting}{value}")
    return result


def check_settings(cfg: DictConfig, **own: type) -> None:
    """Raise an InputError for a setting that has a wrong type, or is out of range.

    Args:
        cfg: the config of a run.
        own: key → type of the settings that the program itself reads.
    """
    check_types(cfg, "", **own)
    check_range(0, 2**32 - 1, seed=cfg.seed)
    if str(cfg.trainer.precision) not in PRECISIONS:
        raise InputError(
            f"expected trainer.precision 32-true, bf16-mixed or 16-mixed, got {cfg.trainer.precision}: weights have to"
            " be in float32, because images are normalised in it"
        )


def check_keys(cfg: DictConfig, program: Path) -> None:
    """Raise an InputError for a key of a task, or one that the command line adds (+) at the top, if nothing reads it.

    It is also raised for the name of a file in place of its settings, as in module.loss=propagation.

    Deeper keys are arguments of a `_target_`, which refuses unknown ones. Experiments may have keys at the top that
    nothing reads after an override.
    """
    own: Any = OmegaConf.load(program)
    groups = [group.rpartition("@")[2] for group in list_groups(own)]
    texts = [OmegaConf.to_yaml(node) for node in (cfg, HydraConfig.get())]
    interpolated = re.findall(r"\$\{(?:[\w.]+:)?\.*(\w+)", " ".join(texts))
    known = [*own, *groups, *SHARED_KEYS, *interpolated]
    given: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)  # interpolations in them stay
    places = [text for text in given if re.match(r"\+*data\.(root|train\.roots|val\.roots)=", text)]
    if {"root", "roots"} <= {text.partition("=")[0].rpartition(".")[2] for text in places}:
        raise InputError(f"expected data.root or the roots of each split, got {' and '.join(places)}: leave out one")
    for text in given:
        key = re.split(r"\W", text.lstrip("+"), maxsplit=1)[0]
        if key in ("blocks", "direct") and key not in interpolated:
            mend = f"AnyHead reads explainer.network.{key}, or explainers.anyhead.network.{key} in eval.py"
            raise InputError(f"no setting {key}: nothing reads it; {mend}")
        if text.startswith("+") and key in cfg and key not in known:
            raise InputError(f"no setting {key}: nothing reads it; {suggest_names(key, known)}")
    for name, settings in (cfg.get("tasks") or {}).items():
        for key in (str(key) for key in settings if key not in TASK_KEYS):
            raise InputError(f"no setting tasks.{name}.{key}: nothing reads it; {suggest_names(key, TASK_KEYS)}")
    for group, name in ((str(group), str(group).partition("@")[2]) for group in HydraConfig.get().runtime.choices):
        if name and isinstance(file := OmegaConf.select(cfg, name), str):
            folder = f"configs/{group.partition('@')[0]}"
            raise InputError(f"expected {group}={file}, which names a file in {folder}, got {name}={file}")


def explain_unknown_key(cause: Any, configs: Path) -> str:
    """The message for a key that is not in the config: which program has it, or the most similar keys."""
    node, key, full = cause.parent_node, str(cause.key), str(cause.full_key)
    parent = full.removesuffix(key).rstrip(".")
    if parent in ("explainers", "tasks"):
        return f"no setting {full}: add {key} to {parent}=[...], which has {', '.join(node) or 'none'}"
    programs: dict[str, Any] = {path.stem: OmegaConf.load(path) for path in configs.glob("*.yaml")}
    for program, own in programs.items():
        if full in list_keys(own):
            return f"no setting {full} in the config of this program: {program}.py has it"
    names = {str(name) for name in node}
    if not parent:  # groups, of which some, such as `experiment`, are no keys
        names |= {group for own in programs.values() for group in list_groups(own)}
    root = OmegaConf.select(node, "." * (len(parent.split(".")) + 1)) if parent else node  # one more for each parent
    everywhere = [name for name in list_keys(root) if name.rpartition(".")[2] == key]
    similar = get_close_matches(key.lower(), names, 3, 0.7)  # of the key alone: all siblings share its beginning
    siblings = [f"{parent}.{name}".lstrip(".") for name in (similar or ([] if everywhere else sorted(names)))]
    return f"no setting {full}: {suggest_names(full, siblings, everywhere)}"


def name_key(cfg: DictConfig, name: str, value: str) -> str:
    """Write a setting of the library as a key of a config, or by its name alone if several keys have it.

    >>> cfg = DictConfig({"data": {"seed": 8}, "module": {"tune": "head", "min_crop": 0.5, "seed": 1}})
    >>> name_key(cfg, "tune", ""), name_key(cfg, "min_crop", "None"), name_key(cfg, "seed", "")
    ('module.tune', 'module.min_crop=null', 'seed')
    >>> name_key(cfg, "image_size", "(32, 48)")
    '++target.model.img_size=[32,48]'
    """
    keys = [key for key in list_keys(cfg) if key.rpartition(".")[2] == name]
    key = OTHER_KEYS.get(name, keys[0] if len(keys) == 1 else name)
    typed = "null" if value == "None" else f"[{value[1:-1].replace(' ', '')}]"
    return f"{key}={typed}" if value else key


def list_groups(program: Any) -> list[str]:
    """The groups that the config file of a program chooses files of, such as `explainers@explainer`."""
    return [str(group) for choice in program.defaults if isinstance(choice, DictConfig) for group in choice]


def list_keys(cfg: Any) -> list[str]:
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
    hints, defaults = _read_arguments(str(node._target_)) if "_target_" in given else (own, {})
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
def _read_arguments(target: str) -> tuple[dict[str, Any], dict[str, Any]]:
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


def use_weights(cfg: DictConfig) -> None:
    """Replace `weights` by the settings of `target.model` that it stands for, so that both ways are the same run.

    Of a pretrained model at another image size (`img_size`), it is `pretrained_cfg_overlay.file`: there, timm resizes
    the position embedding.

    Raises:
        InputError: if there is no such file, if the target takes none, or if the command names two.
    """
    with open_dict(cfg):
        file = cfg.pop("weights", None)
    if file is None:
        return
    model = OmegaConf.select(cfg, "target.model")
    if "checkpoint_path" not in (model or ()):
        name = HydraConfig.get().runtime.choices.get("target")
        raise InputError(f"expected a target of timm for weights={file}, got target={name}: set its own file instead")
    if not os.path.isfile(str(file)):
        raise InputError(f"expected a file of weights, got weights={file}: there is no such file; correct the path")
    for given in HydraConfig.get().overrides.task:
        if given.lstrip("+").startswith(f"{CHECKPOINT_PATH}="):
            raise InputError(f"expected weights or {CHECKPOINT_PATH}, got weights={file} and {given}: leave out one")
    with open_dict(model):
        if model.get("pretrained") and "img_size" in model:
            OmegaConf.update(model, "pretrained_cfg_overlay", {"file": file})
        else:
            model.pretrained = False
            model.checkpoint_path = file


def use_random_weights(cfg: DictConfig) -> None:
    """Replace all weights that would be downloaded by random ones, and say which; files of weights stay."""
    settings: Any = OmegaConf.to_container(cfg)  # the target of an explainer is an interpolation
    replaced: dict[str, Any] = {}
    for key, value in leaves(settings):
        place, _, name = key.rpartition(".")
        node = OmegaConf.select(cfg, place) if place else cfg
        if name == "mae" and value and not os.path.isfile(value):
            replaced[key] = None
        elif name == "pretrained" and value is True and not OmegaConf.select(node, "pretrained_cfg_overlay.file"):
            replaced[key] = False
        elif name == "pretrained" and node.get("_target_") == "explainers.vectors.projections.text_of":
            replaced[key] = ""
        elif name == "text_head" and value is None and node.get("functionals") == "texts":
            replaced[key] = {"_target_": "explainers.text.clip_text_head", "_partial_": True, "pretrained": ""}
    for key, random in replaced.items():
        OmegaConf.update(cfg, key, random, force_add=True)
    if replaced and is_first_process():
        print(f"fast_dev_run: random weights, nothing is downloaded ({', '.join(replaced)})")
