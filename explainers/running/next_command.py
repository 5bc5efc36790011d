"""The command that follows a training, which the last line of the training names."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from explainers.app.choosing import quick_method
from explainers.running.folder import relative
from explainers.running.weights import FILE
from explainers.saved.weights import read_header
from explainers.share.catalogue import WEIGHTS, for_target

OF_LOADERS = {"batch_size", "eval_batch_size", "num_workers", "seed", "size", "limit", "halve", "os_cache"}
"""Settings of data that change how many images are read, or how."""

PHOTO = "my/photo.jpg"
PHOTOS = ["experiment=explain", "data.root=photos/"]
WITHOUT_CLASSES = ("texts", "images", "isotropic")  # what AnyHead learns for where there are no classes to explain


@dataclass
class Training:
    """A training that has ended.

    Args:
        cfg: its config.
        choices: group → its file, as Hydra has chosen them.
        folder: the run's folder, relative to the working directory.
        classes: names of the classes of the images; empty if they have none.
        target: the classifier that was trained; `None` after other trainings.
    """

    cfg: DictConfig
    choices: Mapping[str, Any]
    folder: Path
    classes: Sequence[str]
    target: Any = None

    @property
    def name(self) -> str:
        """The name of the run; of a job of a sweep that of its folder, so that each has its own evaluation."""
        return str(self.folder.relative_to("runs") if self.folder.is_relative_to("runs") else self.cfg.name)

    @property
    def module(self) -> dict[str, Any]:
        """Settings of what was trained."""
        return _plain(self.cfg.module)

    @property
    def images(self) -> dict[str, Any]:
        """Settings of the images, without those of the loader."""
        return _without(_plain(self.cfg.data), OF_LOADERS)

    def chosen(self, *groups: str) -> list[str]:
        """The overrides that choose the same files of these groups."""
        return [f"{group}={self.choices[group]}" for group in groups if self.choices.get(group)]


def next_command(run: Training) -> str:
    """The command that comes after a training, or what loads its result where no command can be composed."""
    after = {
        "Surrogate": _train_fastshap,
        "Classifier": _measure_classifier,
        "SelfExplaining": _measure_model,
        "ExplainabilityVector": _measure_model,
    }
    try:
        if GlobalHydra.instance().is_initialized():  # the process was started by `hydra.main`
            return after.get(run.module["_target_"].rpartition(".")[2], _use_explainer)(run)
    except (HydraException, OmegaConfBaseException):  # with configs of the user's own, for example
        pass
    kind = run.module["_target_"].rpartition(".")[2]
    return f"the model is in {run.folder}" if kind in ("Classifier", "Surrogate") else _loading(run)


def _loading(run: Training) -> str:
    return f'explainers.load("{run.folder}") in Python'


def _train_fastshap(run: Training) -> str:
    surrogate = f"explainer.surrogate={_text(f'{run.folder}/target.safetensors')}"
    given = [
        *("experiment=vit_shapley", "explainers@explainer=fastshap", "cache=none"),  # FastSHAP explains any target
        surrogate,
        *run.chosen("target", "data"),
        f"name={_text(f'{run.name}_fastshap')}",
    ]
    wanted = {"data_dir": run.cfg.data_dir, "target": run.cfg.target, "grid": run.cfg.grid, "data": run.images}
    return _command("train", given, wanted)


def _measure_classifier(run: Training) -> str:
    target = _plain(run.cfg.target)
    if run.module["tune"] == "head":
        target["head"] = f"{run.folder}/head.safetensors"
    else:
        classes = run.module["num_classes"] or len(run.classes)
        file = f"{run.folder}/target.safetensors"
        target["model"] |= {"pretrained": False, "checkpoint_path": file, "num_classes": classes}
    given, settings = _shipped(run) or (_without_training(run), {})
    return _measure(run, given, settings | {"target": target}, on_task=True)


def _shipped(run: Training) -> tuple[list[str], dict[str, Any]] | None:
    """The overrides and the settings of the AnyHead that is shipped for the backbone and the grid, if there is one."""
    for known in for_target(run.target):
        header = read_header(known.folder / WEIGHTS)
        if known.explainer == "anyhead" and header["grid"].items() <= _plain(run.cfg.grid).items():
            settings = {"network": _without(header["network"], {"class"})} | header["reading"]
            given = ["explainers=[chance,anyhead]", f"explainers.anyhead.weights={relative(known.folder / WEIGHTS)}"]
            return given, {"explainers": {"anyhead": settings}}
    return None


def _without_training(run: Training) -> list[str]:
    """The override that chooses the method without training that fits the model best."""
    return [f"methods=[{','.join(quick_method(run.target, run.target.grid))}]"]


def _measure_model(run: Training) -> str:
    """After a model that predicts and may explain itself."""
    file = f"{run.folder}/model.safetensors"
    target = _plain(run.cfg.target) | {"_target_": "explainers.vectors.exported_target", "head": file}
    if run.module.get("alpha", 0) < 1:
        given = ["explainers=[chance,self_explainer]", f"explainers.self_explainer.weights={_text(file)}"]
    else:
        given = _without_training(run)
    own_classes = run.module.get("projection", "that of `onto`") is not None
    return _measure(run, given, {"target": target}, own_classes or _knows_classes(run))


def _use_explainer(run: Training) -> str:
    """Measure an explainer on the task of its training; without one, explain photos."""
    if (run.module.get("loss") or {}).get("functionals", "head") in WITHOUT_CLASSES:
        return _loading(run)
    if not _is_task(run, _knows_classes(run)):
        return shlex.join(["explainers", "explain", PHOTO, "--explainer", str(run.folder), *_own_weights(run)])
    name = str(run.choices["explainers@explainer"])
    weights = f"explainers.{name}.weights={_text(f'{run.folder}/explainer.safetensors')}"
    settings = _without(_plain(run.cfg.explainer), {"target", "grid", "weights", "mae", "pretrained"})
    wanted = {"explainers": {name: settings}, "target": _plain(run.cfg.target)}
    return _measure(run, [f"explainers=[chance,{name}]", weights], wanted, on_task=True)


def _own_weights(run: Training) -> list[str]:
    """The options that name a model whose weights come from a file; the file of an explainer names those of timm."""
    model = _plain(run.cfg.target).get("model") or {}
    file = model.get("checkpoint_path") or (model.get("pretrained_cfg_overlay") or {}).get("file")
    file = run.cfg.explainer.get("surrogate") or file
    return ["--model", model["model_name"], "--weights", file] if file else []


def _knows_classes(run: Training) -> bool:
    """Whether the target itself tells the classes of the images apart."""
    target = run.cfg.target
    return target.get("head") is None and (target.get("model") or {}).get("num_classes") == len(run.classes)


def _measure(run: Training, given: list[str], wanted: Mapping[str, Any], on_task: bool) -> str:
    """The command that explains and measures on the images of the training, or explains photos."""
    task = run.choices.get("data")
    if _is_task(run, on_task):
        own = [f"data.root={_text(run.images['root'])}"] if task == "folder" else []  # the key that trained
        given = [f"tasks=[{task}]", *own, *given]
        wanted = {"grid": run.cfg.grid, **wanted, "data_dir": run.cfg.data_dir, "tasks": {task: {"data": run.images}}}
    else:
        named = any(override.startswith("methods=") for override in given)
        given = [*PHOTOS, *given, *([] if named else ["methods=[]"])]
        wanted = {"grid": run.cfg.grid, **wanted}
    return _command("eval", [*given, *run.chosen("target"), f"name={_text(f'{run.name}_eval')}"], wanted)


def _is_task(run: Training, on_task: bool) -> bool:
    """Whether eval.py can measure on the images of a training, which have the classes of the target."""
    names = GlobalHydra.instance().config_loader().get_group_options("tasks")
    return on_task and run.choices.get("data") in names


def _command(program: str, given: Sequence[str], wanted: Mapping[str, Any]) -> str:
    """The command with the given overrides, and with those that turn its other settings into the wanted ones."""
    overrides = list(given)
    for key, settings in wanted.items():
        composed = compose(program, overrides)  # earlier overrides change what is interpolated here
        overrides += _shortened(_differences(_plain(settings), _plain(composed.get(key)), key))
    return shlex.join(["python", f"{program}.py", *overrides])


def _shortened(overrides: Iterable[str]) -> list[str]:
    """Overrides with `weights=FILE` in place of the two that it stands for.

    >>> _shortened(["target.model.pretrained=false", "target.model.checkpoint_path=a.pth", "seed=1"])
    ['seed=1', 'weights=a.pth']
    """
    overrides = list(overrides)
    names, _, values = zip(*(text.partition("=") for text in overrides), strict=True) if overrides else ((), (), ())
    given = dict(zip((name.lstrip("+") for name in names), values, strict=True))
    if given.get(FILE, '""') == '""' or "target.model.img_size" in given:  # see `use_weights`
        return overrides
    longer = (f"{FILE}={given[FILE]}", "target.model.pretrained=false")
    return [*(text for text in overrides if text not in longer), f"weights={given[FILE]}"]


def _differences(wanted: Any, composed: Any, key: str) -> Iterator[str]:
    """Overrides that turn composed settings into the wanted ones."""
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            there = isinstance(composed, dict) and name in composed
            yield from _differences(value, composed[name] if there else ..., f"{key}.{name}")
    elif wanted != composed:
        yield f"{'++' if composed is ... else ''}{key}={_text(wanted)}"


def _text(value: Any) -> str:
    """A value as Hydra reads it in an override.

    >>> _text([1, None, True, "a b"]), _text("runs/x=1/head.safetensors"), _text("1e3"), _text("runs/x")
    ('[1, null, true, "a b"]', '"runs/x=1/head.safetensors"', '"1e3"', 'runs/x')
    """
    plain = isinstance(value, str) and re.fullmatch(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_/][\w./-]*", value)
    return str(value) if plain or isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _plain(settings: Any) -> Any:
    """Settings in nested dicts and lists."""
    return OmegaConf.to_container(settings, resolve=True) if OmegaConf.is_config(settings) else settings


def _without(settings: Any, names: set[str]) -> Any:
    """Nested settings without those of these names."""
    if not isinstance(settings, dict):
        return settings
    return {name: _without(value, names) for name, value in settings.items() if name not in names}
