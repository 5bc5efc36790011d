"""The command that follows a training: its last line names it."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from explainers.anyhead.anyhead import TRAINING as OF_ANYHEAD
from explainers.shapley.shapley import TRAINING as OF_SHAPLEY
from explainers.training.training_module import INITIAL_WEIGHTS
from explainers.tve.tve import TRAINING as OF_TVE

TASKS = ("cats_vs_dogs", "cifar10", "cifar100", "digits", "folder", "imagenette", "mura")
"""Files of configs/data, with classes, that have a file of configs/tasks."""

OF_LOADERS = {"batch_size", "eval_batch_size", "num_workers", "seed", "size", "limit", "halve", "os_cache"}
"""Settings of data that change how many images are read, or how."""

OF_LEARNING = {"target", "grid", *OF_TVE, *OF_ANYHEAD, *OF_SHAPLEY, *INITIAL_WEIGHTS} - {"surrogate"}
"""Settings of an explainer that its trained weights do not depend on, and those that stand elsewhere in the config."""

PHOTOS = ["experiment=explain", "data.root=photos/"]
ANY_MODEL = "methods=[IntegratedGradients]"
SELF_EXPLAINER = "explainers=[chance,self_explainer]"


def next_command(cfg: DictConfig, choices: Mapping[str, Any], folder: Path, classes: Sequence[str]) -> str:
    """The command that comes after a training, or what loads its result where there is none.

    Args:
        cfg: the config of the training.
        choices: group → its file, as Hydra has chosen them.
        folder: the run's folder, relative to the working directory.
        classes: names of the classes of the images; empty if they have none.
    """
    module: Any = OmegaConf.to_container(cfg.get("module") or cfg.explainer, resolve=True)
    kind = str(module.get("_target_")).rpartition(".")[2]
    try:
        if kind == "Surrogate":
            return _of_surrogate(cfg, choices, f"{folder}/target.safetensors")
        return _evaluation(cfg, choices, folder, kind, module, classes)
    except (HydraException, OmegaConfBaseException, _NoHydra):  # with configs of the user's own, for example
        return f'explainers.load("{folder}") in Python' if cfg.get("explainer") else f"the model is in {folder}"


class _NoHydra(Exception):
    """This process was not started by `hydra.main`."""


def _of_surrogate(cfg: DictConfig, choices: Mapping[str, Any], file: str) -> str:
    given = ["experiment=fastshap", f"explainer.surrogate={_text(file)}", *_chosen(choices, "target", "data")]
    wanted = {"data_dir": cfg.data_dir, "target": cfg.target, "grid": cfg.grid, "data": _of_images(cfg)}
    return _command("train", [*given, f"name={_text(f'{cfg.name}_fastshap')}"], wanted)


def _evaluation(
    cfg: DictConfig, choices: Mapping[str, Any], folder: Path, kind: str, module: Any, classes: Sequence[str]
) -> str:
    """The command that explains and measures, on the task of the training if the model has its classes."""
    target: Any = OmegaConf.to_container(cfg.target, resolve=True)
    own_head = target.get("head") is None and (target.get("model") or {}).get("num_classes") == len(classes)
    fits, wanted = own_head, {"grid": cfg.grid}
    if kind == "Classifier":
        fits, given = True, [ANY_MODEL]
        if module["tune"] == "head":
            target["head"] = f"{folder}/head.safetensors"
        else:
            count = module["num_classes"] or len(classes)
            saved = {"pretrained": False, "checkpoint_path": f"{folder}/target.safetensors", "num_classes": count}
            target["model"] |= saved
    elif kind in ("SelfExplaining", "ExplainabilityVector"):
        file = f"{folder}/model.safetensors"
        fits = own_head or kind == "ExplainabilityVector" or module["projection"] is not None
        target |= {"_target_": "explainers.vectors.exported_target", "head": file}
        explains = kind == "ExplainabilityVector" or module["alpha"] < 1
        given = [SELF_EXPLAINER, f"explainers.self_explainer.weights={_text(file)}"] if explains else [ANY_MODEL]
    else:
        name = str(choices["explainers@explainer"])
        given = [f"explainers=[chance,{name}]"]
        given += [f"explainers.{name}.weights={_text(f'{folder}/explainer.safetensors')}"]
        wanted["explainers"] = {name: _without(module, OF_LEARNING)}
    wanted["target"] = target
    if fits and choices.get("data") in TASKS:
        task = str(choices["data"])
        given = [f"tasks=[{task}]", *given]
        wanted |= {"data_dir": cfg.data_dir, "tasks": {task: {"data": _of_images(cfg)}}}
    else:
        given = [*PHOTOS, *given, *(["methods=[]"] if ANY_MODEL not in given else [])]
    return _command("eval", [*given, *_chosen(choices, "target"), f"name={_text(f'{cfg.name}_eval')}"], wanted)


def _command(program: str, given: Sequence[str], wanted: Mapping[str, Any]) -> str:
    """The command with these overrides, and with those that give the wanted settings where it has others."""
    if not GlobalHydra.instance().is_initialized():
        raise _NoHydra
    found: list[str] = []
    for key, settings in wanted.items():  # the first ones change the others
        composed = compose(program, [*given, *found])
        node = composed.get(key)
        got = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        settings = OmegaConf.to_container(settings, resolve=True) if OmegaConf.is_config(settings) else settings
        found += _differences(settings, got, key)
    return " ".join([f"python {program}.py", *map(_word, [*given, *found])])


def _differences(wanted: Any, got: Any, key: str) -> Iterator[str]:
    """Overrides of Hydra that turn settings into the wanted ones."""
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            there = isinstance(got, dict) and name in got
            yield from _differences(value, got[name] if there else ..., f"{key}.{name}")
    elif wanted != got:
        yield f"{'++' if got is ... else ''}{key}={_text(wanted)}"


def _text(value: Any) -> str:
    """A value as Hydra reads it in an override.

    >>> _text([1, None, True, "a b"]), _text("runs/x=1/head.safetensors"), _text("1e3")
    ("[1,null,true,'a b']", "'runs/x=1/head.safetensors'", "'1e3'")
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | dict):
        items = [f"{name}:{_text(each)}" for name, each in value.items()] if isinstance(value, dict) else value
        inside = ",".join(items if isinstance(value, dict) else map(_text, items))
        return f"{{{inside}}}" if isinstance(value, dict) else f"[{inside}]"
    if not isinstance(value, str) or re.fullmatch(r"(?!(null|true|false|nan|inf)$)[A-Za-z_/][\w./-]*|", value):
        return str(value)
    return "'" + value.replace("'", r"\'") + "'"


def _word(override: str) -> str:
    """An override as a word of a shell; brackets need no quotes there."""
    return override if re.fullmatch(r"[\w./=,\[\]@:+-]+", override) else shlex.quote(override)


def _chosen(choices: Mapping[str, Any], *groups: str) -> list[str]:
    return [f"{group}={choices[group]}" for group in groups if choices.get(group)]


def _of_images(cfg: DictConfig) -> dict[str, Any]:
    settings: Any = OmegaConf.to_container(cfg.data, resolve=True)
    return _without(settings, OF_LOADERS)


def _without(settings: Any, names: set[str]) -> Any:
    """Nested settings without those of these names."""
    if not isinstance(settings, dict):
        return settings
    return {name: _without(value, names) for name, value in settings.items() if name not in names}
