"""Configs without a file of their own: short names, models of timm, tasks; and settings that follow from a model."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError

CONFIGS = Path(__file__).parents[2] / "configs"

PACKAGES = {"metrics": "evaluation"}
"""Group of configs/names → where its options belong in a config, if that is not named like the group."""


@cache
def named_options(group: str) -> dict[str, Any]:
    """Name → what it stands for, of the options of a group that share the file configs/names/GROUP.yaml."""
    content: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"names/{group}.yaml"))
    return content


def files_of(group: str) -> set[str]:
    """The names of the files of a group."""
    return {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def store_names() -> None:
    """Hand Hydra the options of configs/names, and a task for each data set."""
    store = ConfigStore.instance().store
    for group in ("data", "metrics", "module", "projection"):
        for name, content in named_options(group).items():
            store(name, content, group, PACKAGES.get(group))
    for name, figure in named_options("figures").items():
        store(name, {name: figure}, "figures")
    for name, model in named_options("target").items():
        store(name, timm_target(model), "target", "_global_")
    for name in (files_of("data") | named_options("data").keys()) - files_of("tasks"):
        head = f"${{oc.select:heads.{name},${{target.head}}}}"
        task = {"defaults": [{f"/data@tasks.{name}.data": name}], "tasks": {name: {"target": {"head": head}}}}
        store(name, task, "tasks", "_global_")


def store_targets(words: Iterable[str]) -> None:
    """Hand Hydra the targets that a command names and that have no file: models of timm, and functions of Python.

    Args:
        words: those of the command, such as `target=vit_small_patch16_224`.
    """
    given = {name for word in words if word.startswith("target=") for name in word[7:].split(",")}
    for name in given - files_of("target") - named_options("target").keys():
        from explainers.models.fetching import is_in_timm  # the import takes seconds

        if is_in_timm(name):
            ConfigStore.instance().store(name, timm_target(name), "target", "_global_")
        elif is_python_path(name):
            ConfigStore.instance().store(name, own_target(name), "target", "_global_")


def compose_config(program: str, overrides: Sequence[str]) -> DictConfig:
    """The config of a program, `train` or `eval`, outside of it; it is also that of `${hydra:...}`."""
    store_targets(overrides)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose(program, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return cfg


def timm_target(model: str) -> dict[str, Any]:
    """The config of a target of a model of timm."""
    return {"defaults": ["timm"], "target": {"model": {"model_name": model}}}


def own_target(function: str) -> Any:
    """The config of a target of the model that a function returns, which may be any that `as_target` takes."""
    content: Any = OmegaConf.load(CONFIGS / "target/timm.yaml")
    content.target.model = {"_target_": "explainers.models.as_target", "model": {"_target_": function}}
    return content


def is_python_path(name: str) -> bool:
    """Whether a name such as `package.module.function` is in a module that Python finds."""
    try:
        return "." in name and find_spec(name.rpartition(".")[0]) is not None
    except ModuleNotFoundError:  # of its package
        return False


def import_defaults() -> Any:
    """The functions that settings follow from; their import takes seconds.

    While Hydra composes a config, OmegaConf asks for each setting that a file or an override replaces, and takes an
    error for an answer.
    """
    if not HydraConfig.initialized():
        raise InputError("settings follow from the model once the config is composed")
    from explainers.running import defaults

    return defaults


def model_default(name: str, *, _root_: DictConfig) -> Any:
    """The setting that follows from `target.model`; resolves `${model_default:blocks}` in configs/target/timm.yaml.

    Args:
        name: `image_size`, `patch_size`, `blocks`, `four_blocks`, `direct`, `paths`, `removals`, `functionals`,
            `coalitions`, or a field of `ImageTransform`.
    """
    if OmegaConf.is_missing(_root_.target.model, "model_name"):
        raise InputError("expected a model of timm: name it, as in target=vit_small_patch16_224")
    defaults = import_defaults()
    settings = OmegaConf.to_container(_root_.target.model, resolve=True)
    headed = OmegaConf.select(_root_, "target.head") is not None
    value = defaults.read_model_settings(json.dumps(settings, sort_keys=True), headed)[name]
    return OmegaConf.create(value) if isinstance(value, list) else value  # as if a file had it


def fastest_precision(accelerator: str) -> str:
    """Lightning's name of the fastest precision; resolves `${fastest_precision:...}` of configs/trainer."""
    return str(import_defaults().fastest_precision(accelerator))


OmegaConf.register_new_resolver("model_default", model_default, replace=True)
OmegaConf.register_new_resolver("fastest_precision", fastest_precision, replace=True)
store_names()
