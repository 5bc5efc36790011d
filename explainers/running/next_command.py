"""The command that follows a training, which the last line of the training names."""

import shlex
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from explainers.running.folder import quoted

PHOTO = "my/photo.jpg"
WITHOUT_CLASSES = ("texts", "images", "isotropic")  # what AnyHead learns for where there are no classes to explain
OF_TIMM = {"_target_", "model_name", "pretrained", "checkpoint_path", "pretrained_cfg_overlay", "num_classes"}
"""Settings of a model that its name and a file of weights say, too."""


def next_command(cfg: DictConfig, target: str, folder: Path) -> str:
    """The command that uses what a training left; for models that no command explains, what loads them in Python.

    Args:
        cfg: the config of the training.
        target: the chosen file of configs/target, or a name of timm.
        folder: its folder, relative to the working directory.
    """
    module: Any = OmegaConf.to_container(cfg.module, resolve=True)
    model: Any = OmegaConf.to_container(OmegaConf.create(cfg.target.get("model") or {}), resolve=True)
    kind = module["_target_"].rpartition(".")[2]
    if kind == "Surrogate":
        fastshap = ["experiment=vit_shapley", "explainers@explainer=fastshap", "cache=none"]  # it explains any target
        file, name = quoted(f"{folder}/target.safetensors"), quoted(f"{folder.name}_fastshap")
        own = [f"target={target}", f"explainer.surrogate={file}", f"name={name}"]
        return shlex.join(["python", "train.py", *fastshap, *own])
    if kind == "Classifier" and not model.keys() - OF_TIMM:
        explain = ["explainers", "explain", PHOTO, "--model", model["model_name"]]
        if module["tune"] == "all":
            return shlex.join([*explain, "--weights", f"{folder}/target.safetensors"])
        weights = ["--weights", model["checkpoint_path"]] if model.get("checkpoint_path") else []
        return shlex.join([*explain, *weights, "--head", f"{folder}/head.safetensors"])
    if kind == "ExplainerTraining" and (module.get("loss") or {}).get("functionals", "head") not in WITHOUT_CLASSES:
        resized = (model.get("pretrained_cfg_overlay") or {}).get("file")
        trained_for = cfg.explainer.get("surrogate") or model.get("checkpoint_path") or resized
        if model.keys() - OF_TIMM or not (trained_for or model.get("pretrained")):
            return f'explainers.load("{folder}", target=...) in Python'
        # The explainer names a model of timm itself
        own = ["--model", model["model_name"], "--weights", trained_for] if trained_for else []
        return shlex.join(["explainers", "explain", PHOTO, "--explainer", str(folder), *own])
    return f"the model is in {folder}" if kind == "Classifier" else f'explainers.load("{folder}") in Python'
