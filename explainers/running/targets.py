"""Configs without a file of their own: short names, models of timm, tasks; and settings that follow from a model."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.fetching import is_in_timm, similar_targets
from explainers.models.heads import NoHead
from explainers.models.removal import supports_drop
from explainers.training.trunk import default_blocks, space_blocks
from explainers.transformer.direct_paths import default_direct
from explainers.transformer.stage_paths import default_stages

CONFIGS = Path(__file__).parents[2] / "configs"


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
        if group == "target" and not is_in_timm(content) and is_python_path(content):
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
        is_target = group == "target" and (is_in_timm(name) or is_python_path(name))
        return is_task or is_target or name in named_options(group)

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
    if (is_in_timm(name) or name in named_options("target")) and own and "main" not in own:
        raise InputError(f"expected a file of another name than a known target, got {[*own.values()][0]}: rename it")


def model_default(name: str, *, _root_: DictConfig) -> Any:
    """The setting that follows from `target.model`; resolves `${model_default:blocks}` in configs/target/timm.yaml.

    Args:
        name: `image_size`, `patch_size`, `blocks`, `four_blocks`, `direct`, `paths`, `removals`, `functionals`,
            `coalitions`, or a field of `ImageTransform`.
    """
    if OmegaConf.is_missing(_root_.target.model, "model_name"):
        raise InputError("expected a model of timm: name it, as in target=vit_small_patch16_224")
    settings = OmegaConf.to_container(_root_.target.model, resolve=True)
    headed = OmegaConf.select(_root_, "target.head") is not None
    value = read_model_settings(json.dumps(settings, sort_keys=True), headed)[name]
    return OmegaConf.create(value) if isinstance(value, list) else value  # as if a file had it


@cache
def read_model_settings(settings: str, headed: bool = False) -> dict[str, Any]:
    """All settings that follow from a model, which is built without weights, or by its own function.

    Args:
        settings: those of `target.model`, as JSON.
        headed: whether it gets a head for another task.

    Raises:
        InputError: if timm has no model of this name.
    """
    given = json.loads(settings)
    name = given.get("model_name", "")
    if given.get("_target_", "").endswith(".create_model") and ":" not in name and not is_in_timm(name):
        raise InputError(f"no model named {name} in timm: {similar_targets(name)}")
    without_weights = {"pretrained": False, "checkpoint_path": ""}
    own = given.get("_target_") == "explainers.models.as_target"
    with nullcontext() if own else torch.device("meta"):
        model = instantiate(given | {key: without_weights[key] for key in given.keys() & without_weights})
    with torch.device("cpu"):  # whose mean is read, whatever device the caller works on
        target = model if own else TargetModel(model, nn.Identity())
    direct = default_direct(target)
    stages = [] if direct else default_stages(target)
    functionals = "head" if headed else _choose_functionals(model)
    return {
        **{key: list(value) if key == "fill" else value for key, value in asdict(target.transform).items()},
        "image_size": target.grid.image_size,
        "patch_size": target.grid.patch_size,
        "blocks": default_blocks(target),
        "four_blocks": space_blocks(target, 4),
        "direct": direct or stages,
        "paths": "stages" if stages else "flow",
        "removals": ["zero", "black", *["drop"] * supports_drop(target)],
        "functionals": functionals,
        "coalitions": "ranking" if direct and functionals != "images" else "regions",
    }


def _choose_functionals(model: Any) -> str:
    """What AnyHead learns to explain: classes, texts for towers whose text tower open_clip has, otherwise likeness."""
    if isinstance(model, TargetModel):
        return "images" if isinstance(model.head, NoHead) else "head"
    config = getattr(model, "pretrained_cfg", {})
    name, tag = config.get("architecture", ""), config.get("tag") or ""
    if ("clip" in name or "siglip" in name) and "_ft_" not in tag:
        return "images" if "tinyclip" in tag else "texts"
    return "head" if model.num_classes else "images"


for plugin in (WithoutFiles, SearchedLast):
    Plugins.instance().register(plugin)
OmegaConf.register_new_resolver("model_default", model_default, replace=True)
