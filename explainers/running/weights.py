"""Weights that a command names in place of those that are downloaded: a file of the target's, or random ones."""

import os
from typing import Any

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf, open_dict

from explainers.errors import InputError
from explainers.saved.records import leaves

FILE = "target.model.checkpoint_path"
"""The setting of timm that `weights` stands for, together with `target.model.pretrained=false`."""


def use_weights(cfg: DictConfig) -> None:
    """Replace `weights` by the settings of `target.model` that it stands for, so that both ways are the same run.

    Of a pretrained model at another image size (`img_size`), it is `pretrained_cfg_overlay.file`: there, timm resizes
    the position embedding.

    Args:
        cfg: the config of a run, which is changed.

    Raises:
        InputError: if there is no such file, if the target takes none, or if the command names two.
    """
    with open_dict(cfg):
        file = cfg.pop("weights", None)
    if file is None:
        return
    _check(cfg, file)
    model = cfg.target.model
    with open_dict(model):
        if model.get("pretrained") and "img_size" in model:
            OmegaConf.update(model, "pretrained_cfg_overlay", {"file": file})
        else:
            model.pretrained = False
            model.checkpoint_path = file


def _check(cfg: DictConfig, file: str) -> None:
    """Raise an InputError unless the target can read this file."""
    name = HydraConfig.get().runtime.choices.get("target")
    if "checkpoint_path" not in (OmegaConf.select(cfg, "target.model") or ()):
        raise InputError(f"expected a target of timm for weights={file}, got target={name}: set its own file instead")
    if not os.path.isfile(file):
        raise InputError(f"expected a file of weights, got weights={file}: there is no such file; correct the path")
    given = [text for text in HydraConfig.get().overrides.task if text.lstrip("+").startswith(f"{FILE}=")]
    if given:
        raise InputError(f"expected weights or {FILE}, got weights={file} and {given[0]}: leave out one of them")


def use_random_weights(cfg: DictConfig) -> None:
    """Replace all weights that would be downloaded by random ones, and say which; files of weights stay.

    Args:
        cfg: the config of a run, which is changed.
    """
    settings: Any = OmegaConf.to_container(cfg)  # the target of an explainer is an interpolation
    replaced: dict[str, Any] = {}
    for key, value in leaves(settings):
        place, _, name = key.rpartition(".")
        of = OmegaConf.select(cfg, place) if place else cfg
        if name == "mae" and value and not os.path.isfile(value):
            replaced[key] = None
        elif name == "pretrained" and value is True and not OmegaConf.select(of, "pretrained_cfg_overlay.file"):
            replaced[key] = False
        elif name == "pretrained" and of.get("_target_") == "explainers.vectors.text_of":
            replaced[key] = ""
        elif name == "text_head" and value is None and of.get("functionals") == "texts":
            replaced[key] = {"_target_": "explainers.text.clip_text_head", "_partial_": True, "pretrained": ""}
    for key, random in replaced.items():
        OmegaConf.update(cfg, key, random, force_add=True)
    if replaced:
        rank_zero_only(print)(f"fast_dev_run: random weights, nothing is downloaded ({', '.join(replaced)})")
