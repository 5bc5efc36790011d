"""A config before anything is built from it: checks of its keys and values, and what `weights` stands for."""

import inspect
import os
import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Unpack, get_origin, get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from explainers.errors import InputError, check_range, check_types, suggest_names
from explainers.running.targets import CONFIGS
from explainers.saved.files import is_first_process
from explainers.saved.records import leaves

PRECISIONS = ("32-true", "32", "bf16-mixed", "bf16", "16-mixed", "16")
"""Lightning's names of precisions with weights in float32."""

MODELS = ("target", "explainer", "module")
"""Config keys of models, whose files are hashed; those of data may have many gigabytes."""

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
"""Endings of files of weights."""

FILES = ("checkpoint_path", "explaining", "head", "predicting", "surrogate", "weights")
"""Keys of files of weights, which may interpolate other keys."""

TASK_KEYS = ("data", "target", "explainers")
"""Keys of a task in eval.py."""

READ = ("evaluation", "grid")
"""Keys at the top that eval.py reads and its config file leaves to groups."""

OTHER_KEYS = {"weights": "weights", "image_size": "++target.model.img_size", "grid.differs": "++grid.differs"}
"""Settings of the library that have another name in configs, or that only few configs have."""


@dataclass
class ProgramSettings:
    """Types of the settings at the top of a config that the programs themselves read, which OmegaConf checks."""

    seed: int = 0
    name: str = ""
    title: str | None = None
    objective: str = ""
    fit: bool = True
    export: bool = True
    test: bool = False
    next: bool = True
    ckpt_path: str | None = None
    fresh: bool = False
    overlays: bool = False
    differences: str | None = None


def convert_settings(cfg: DictConfig) -> None:
    """Convert the settings that the programs themselves read to their types, or raise OmegaConf's ValidationError."""
    own = [field.name for field in fields(ProgramSettings) if field.name in cfg]
    converted: Any = OmegaConf.merge(ProgramSettings, OmegaConf.masked_copy(cfg, own))
    cfg.merge_with(OmegaConf.masked_copy(converted, own))


def check_settings(cfg: DictConfig) -> None:
    """Raise an InputError for a setting that has a wrong type, or is out of range."""
    check_arguments(cfg)
    check_range(0, 2**32 - 1, seed=cfg.seed)
    if str(cfg.trainer.precision) not in PRECISIONS:
        raise InputError(
            f"expected trainer.precision 32-true, bf16-mixed or 16-mixed, got {cfg.trainer.precision}: weights have to"
            " be in float32, because images are normalised in it"
        )


def check_keys(cfg: DictConfig, program: Path) -> None:
    """Check the keys at the top: their types, and that something reads each one that the command sets.

    Deeper keys are arguments of a `_target_`, which refuses unknown ones. Experiments may have keys at the top that
    nothing reads after an override.

    Raises:
        InputError: for such a key, or the name of a file in place of its settings, as in module.loss=propagation.
    """
    convert_settings(cfg)
    own: Any = OmegaConf.load(program)
    groups = [str(group) for choice in own.defaults if isinstance(choice, DictConfig) for group in choice]
    texts = [OmegaConf.to_yaml(node) for node in (cfg, HydraConfig.get())]
    read = re.findall(r"\$\{(?:[\w.]+:)?\.*(\w+)", " ".join(texts))
    known = {*own, *read, *READ, *(group.rpartition("@")[2].rpartition(" ")[2] for group in groups)}
    given: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)  # interpolations stay
    for text in given:
        key = re.split(r"\W", text.lstrip("+"), maxsplit=1)[0]
        if key in cfg and key not in known:
            raise InputError(f"no setting {key}: nothing reads it; {suggest_names(key, sorted(known))}")
    places = [text for text in given if re.match(r"\+*data\.(root|train\.roots|val\.roots)=", text)]
    if {"root", "roots"} <= {text.partition("=")[0].rpartition(".")[2] for text in places}:
        raise InputError(f"expected data.root or the roots of each split, got {' and '.join(places)}: leave out one")
    for name, settings in (cfg.get("tasks") or {}).items():
        for key in (str(key) for key in settings if key not in TASK_KEYS):
            raise InputError(f"no setting tasks.{name}.{key}: nothing reads it; {suggest_names(key, TASK_KEYS)}")
    for group, name in ((str(group), str(group).partition("@")[2]) for group in HydraConfig.get().runtime.choices):
        if name and isinstance(file := OmegaConf.select(cfg, name), str):
            folder = f"configs/{group.partition('@')[0]}"
            raise InputError(f"expected {group}={file}, which names a file in {folder}, got {name}={file}")


def explain_unknown_key(cause: Any) -> str:
    """The message for a key that is not in the config: similar keys beside it, or the same key at other places."""
    node, key, full = cause.parent_node, str(cause.key), str(cause.full_key)
    names = {str(name) for name in node}
    parents = full.removesuffix(key).count(".")
    if not parents:
        names |= {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    root = OmegaConf.select(node, "." * (parents + 1)) if parents else node  # one more dot for each parent
    elsewhere = [name for name in list_keys(root) if name.rpartition(".")[2] == key]
    return f"no setting {full}: {suggest_names(key, sorted(names), elsewhere)}"


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


def list_keys(cfg: Any) -> list[str]:
    """The dotted keys of a config; an interpolated part has those of its own place."""
    parts: list[tuple[str, Any]] = [("", OmegaConf.to_container(cfg))]
    for path, part in parts:  # which grows
        parts += [(f"{path}.{name}".lstrip("."), value) for name, value in part.items()] if type(part) is dict else []
    return [path for path, _ in parts[1:]]


def check_arguments(node: DictConfig, place: str = "") -> None:
    """Raise an InputError for the first setting whose type differs from the hint of its argument in the `_target_`.

    Args:
        node: a config, or a part of one.
        place: the dotted key of the part, with a dot at its end.

    >>> check_arguments(DictConfig({"data": {"_target_": "datamodules.digits.DigitImages", "batch_size": "eight"}}))
    Traceback (most recent call last):
    explainers.errors.InputError: expected data.batch_size of type int, got 'eight'
    """
    given = [str(name) for name in node if not OmegaConf.is_missing(node, str(name))]
    hints = read_hints(str(node._target_)) if "_target_" in given else {}
    values = {name: node[name] for name in given if name in hints and not OmegaConf.is_dict(node[name])}
    lists = {name: OmegaConf.to_container(value) for name, value in values.items() if OmegaConf.is_list(value)}
    check_types(values | lists, hints, place)
    for part in given:
        if not OmegaConf.is_interpolation(node, part) and OmegaConf.is_dict(node[part]):
            check_arguments(node[part], f"{place}{part}.")


@cache
def read_hints(target: str) -> dict[str, Any]:
    """Type hints of the arguments of a `_target_`; none where they cannot be read: building it raises the reason."""
    try:
        built: Any = get_object(target)
        function = built.__init__ if isinstance(built, type) else built  # type: ignore[misc]
        known = inspect.signature(function).parameters
        hints = {name: hint for name, hint in get_type_hints(function).items() if name in known}
        unpacked = [hint.__args__[0] for hint in hints.values() if get_origin(hint) is Unpack]
        return hints | {name: hint for keys in unpacked for name, hint in get_type_hints(keys).items()}
    except (ImportError, NameError, TypeError, ValueError, HydraException):
        return {}


def check_files(cfg: DictConfig, starts: bool) -> None:
    """Raise an InputError for the first file of weights that is not there.

    Args:
        cfg: the config of a run.
        starts: whether nothing is measured yet: what is measured needs no explainers.
    """
    content: Any = OmegaConf.to_container(cfg)  # interpolations stay
    settings = dict(leaves({name: content.get(name) for name in (*MODELS, "explainers", "tasks")}))
    if OmegaConf.select(cfg, "module.vector.file"):  # in place of the sources
        sources = ("module.vector.explaining", "module.vector.predicting")
        settings = {key: value for key, value in settings.items() if not key.startswith(sources)}
    own = {key.split(".", 2)[-1] for key in settings if key.startswith("tasks.")}  # which count, not the common
    for key in (key for key, text in settings.items() if key not in own and isinstance(text, str)):
        name = key.rpartition(".")[2]
        path = OmegaConf.select(cfg, key) if settings[key].endswith(SUFFIXES) or name in FILES else None
        of_target = name == "checkpoint_path"
        is_file = isinstance(path, str) and "://" not in path and path.endswith(SUFFIXES if not of_target else "")
        if path and is_file and not os.path.isfile(path) and (starts or of_target):
            program = "`python train.py experiment=linear_head`" if name == "head" else "train.py"
            raise InputError(f"no model at {path}: train it first with {program}, or correct {key}")


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
        if given.lstrip("+").startswith("target.model.checkpoint_path="):
            raise InputError(f"expected weights or {given}, got weights={file} besides: leave out one")
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
