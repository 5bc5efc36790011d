"""The files and folders that a command reads, looked for before anything is imported that takes seconds."""

import os
from collections.abc import Mapping
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open

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
    path = last if ckpt_path == "last" else Path(str(ckpt_path))
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}: leave ckpt_path out to start a new run, or correct the path")
    return path


def check_files(cfg: DictConfig, starts: bool) -> None:
    """Raise an InputError for files of weights that are not there, those that the command names first.

    Args:
        cfg: the config of a run.
        starts: whether nothing is measured yet: what is measured needs no explainers.
    """
    texts = find_texts(cfg, *MODELS, "explainers", "tasks")
    own = {key.split(".", 2)[2] for key in texts if key.startswith("tasks.")}  # a task's value counts, not the common
    files = {key: read_file_name(cfg, key, text) for key, text in texts.items() if key not in own}
    typed = " ".join(map(str, HydraConfig.get().overrides.task))
    check_model_files(dict(sorted(files.items(), key=lambda item: str(item[1]) not in typed)), starts)


def find_texts(cfg: DictConfig, *places: str) -> dict[str, str]:
    """Dotted key → text of all leaves below these keys of a config that are texts; interpolations stay."""
    nodes = {place: OmegaConf.select(cfg, place) for place in places}
    parts = [leaves(OmegaConf.to_container(node), place) for place, node in nodes.items() if OmegaConf.is_config(node)]
    return {key: value for part in parts for key, value in part if isinstance(value, str)}


def read_file_name(cfg: DictConfig, key: str, text: str) -> str | None:
    """The file of weights that a setting names; None for other settings, whose interpolations may need the model."""
    names_file = text.endswith(SUFFIXES) or key.rpartition(".")[2] in FILES
    value = OmegaConf.select(cfg, key) if names_file else None
    return value if isinstance(value, str) and (value.endswith(SUFFIXES) or key.endswith("checkpoint_path")) else None


def check_model_files(files: Mapping[str, str | None], starts: bool) -> None:
    """Raise an InputError that names a missing or damaged file of weights, which timm does not.

    Args:
        files: dotted key → file; None, an empty text and addresses of the Hub are no files.
        starts: see `check_files`.
    """
    for key, path in files.items():
        if not path or "://" in path:
            continue
        there = os.path.isfile(path)
        if not there and (starts or key.endswith("checkpoint_path")):
            program = "`python train.py experiment=linear_head`" if key.endswith(".head") else "train.py"
            raise InputError(f"no model at {path}: train it first with {program}, or correct {key}")
        if there and path.endswith(".safetensors"):
            try:
                with safe_open(path, "np"):
                    pass
            except SafetensorError as error:
                raise InputError(f"{path}: expected weights, got a damaged file: write or fetch it again") from error
