"""Configs without a file of their own: short names, models of timm, tasks; and settings that follow from a model."""

import json
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError

CONFIGS = Path(__file__).parents[2] / "configs"

COMPOSING = "EXPLAINERS_COMPOSING"
"""Environment variable, which `program.start` sets while Hydra composes a config. Jobs of SLURM inherit it."""


@cache
def named_options(group: str) -> dict[str, Any]:
    """Name → what it stands for, of the options of a group that share the file configs/names/GROUP.yaml."""
    path = CONFIGS / f"names/{group}.yaml"
    content: Any = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    return content


def is_python_path(name: str) -> bool:
    """Whether a name such as `package.module.function` is in a module that Python finds."""
    try:
        return "." in name and find_spec(name.rpartition(".")[0]) is not None
    except ModuleNotFoundError:  # of its package
        return False


def is_in_timm(name: str) -> bool:
    """Whether timm, whose import takes seconds, has a model of this name."""
    from explainers.models import fetching

    return fetching.is_in_timm(name)


def own_target(function: str) -> Any:
    """The config of a target of the model that a function returns, which may be any that `as_target` takes."""
    content: Any = OmegaConf.create((CONFIGS / "target/timm.yaml").read_text(encoding="utf-8"))
    content.target.model = {"_target_": "explainers.models.as_target", "model": {"_target_": function}}
    return content


class WithoutFiles(ConfigSource):
    """Hydra's source of `named_options`, of `target/NAME` of timm's models and Python's functions, and `tasks/NAME`."""

    @staticmethod
    def scheme() -> str:
        return "timm"

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        content = named_options(group).get(name, name)
        if group == "target" and is_python_path(content) and not is_in_timm(content):
            content = own_target(content)
        elif group == "target":
            content = {"defaults": ["timm"], "target": {"model": {"model_name": content}}}
        elif group == "tasks":
            head = f"${{oc.select:heads.{name},${{target.head}}}}"
            content = {"defaults": [{f"/data@tasks.{name}.data": name}], "tasks": {name: {"target": {"head": head}}}}
        elif group == "figures":
            content = {name: content}
        package = {"target": "_global_", "tasks": "_global_", "metrics": "evaluation"}.get(group)
        config = OmegaConf.create(content)
        return ConfigResult(self.provider, self.full_path(), config, header={"package": package})

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        is_task = group == "tasks" and ((CONFIGS / f"data/{name}.yaml").is_file() or name in named_options("data"))
        is_target = name in named_options(group) or group == "target" and (is_python_path(name) or is_in_timm(name))
        return is_task or is_target

    def is_group(self, config_path: str) -> bool:
        group = config_path.rstrip("/")
        return group in ("", "target", "tasks") or bool(named_options(group))

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List the short names, not the thousand of timm."""
        return sorted(named_options(config_path.rstrip("/")))


class SearchedLast(SearchPathPlugin):
    """Searches `WithoutFiles` after all folders, so that files come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("timm", "timm://")


def check_not_hidden() -> None:
    """Raise an InputError if a known target hides a file of --config-dir or hydra.searchpath, which come later."""
    runtime = HydraConfig.get().runtime
    name = str(runtime.choices.get("target"))
    files = {source.provider: Path(source.path, "target", f"{name}.yaml") for source in runtime.config_sources}
    own = {provider: file for provider, file in files.items() if file.is_file()}
    if own and "main" not in own and (name in named_options("target") or is_in_timm(name)):
        raise InputError(f"expected a file of another name than a known target, got {[*own.values()][0]}: rename it")


def import_defaults() -> Any:
    """The functions that settings follow from; their import takes seconds.

    While Hydra composes a config, OmegaConf asks for each setting that a file or an override replaces, and takes an
    error for an answer.
    """
    if COMPOSING in os.environ and "--resolve" not in sys.argv:
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


for plugin in (WithoutFiles, SearchedLast):
    Plugins.instance().register(plugin)
OmegaConf.register_new_resolver("model_default", model_default, replace=True)
OmegaConf.register_new_resolver("fastest_precision", fastest_precision, replace=True)
