"""The files that a command reads, looked for before anything is imported that takes seconds."""

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.saved.records import leaves

CHECKPOINTS, METRICS = "checkpoints", "metrics.json"
"""What a training leaves in its folder; one that trains nothing, such as an explainability vector, only the second."""

MODELS = ("target", "explainer", "module")
"""Config keys of models, whose files are hashed; those of data may have many gigabytes."""

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
"""Endings of files of weights."""

FILES = ("checkpoint_path", "explaining", "head", "predicting", "surrogate", "weights")
"""Keys of files of weights, which may interpolate other keys."""


def find_checkpoint(ckpt_path: str | None, last: Path) -> Path | None:
    """The checkpoint to resume from.

    Args:
        ckpt_path: path of a checkpoint, or `last` for the run's last one; `None` for the last one if it exists.
        last: path of the run's last checkpoint.
    """
    if ckpt_path is None:
        return last if last.exists() else None
    path = last if ckpt_path == "last" else Path(ckpt_path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}: leave ckpt_path out to start a new run, or correct the path")
    return path


def check_files(cfg: DictConfig, starts: bool) -> None:
    """Raise an InputError for the first file of weights that is not there.

    Args:
        cfg: the config of a run.
        starts: whether nothing is measured yet: what is measured needs no explainers.
    """
    content: Any = OmegaConf.to_container(cfg)  # interpolations stay
    settings = dict(leaves({name: content.get(name) for name in (*MODELS, "explainers", "tasks")}))
    own = {key.split(".", 2)[-1] for key in settings if key.startswith("tasks.")}  # which count, not the common
    for key in (key for key, text in settings.items() if key not in own and isinstance(text, str)):
        name = key.rpartition(".")[2]
        path = OmegaConf.select(cfg, key) if settings[key].endswith(SUFFIXES) or name in FILES else None
        of_target = name == "checkpoint_path"
        is_file = isinstance(path, str) and "://" not in path and path.endswith(SUFFIXES if not of_target else "")
        if path and is_file and not os.path.isfile(path) and (starts or of_target):
            program = "`python train.py experiment=linear_head`" if name == "head" else "train.py"
            raise InputError(f"no model at {path}: train it first with {program}, or correct {key}")
