"""The setting `weights=FILE`: a local file of the target's weights, in place of those that timm downloads."""

import os

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from explainers.errors import InputError

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
