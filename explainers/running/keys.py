"""Keys of a config that nothing reads: they are misspelt."""

import re
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.running.messages import meant

OF_PARTS = ("blocks", "direct", "evaluation", "grid")
"""Keys at the top of a config that groups set for others, even where the others do not read them."""

OF_TASKS = ("data", "target", "explainers")


def check_keys(cfg: DictConfig, program: Path) -> None:
    """Raise an InputError for a key that a command adds (+) at the top of a config, or of a task, that nothing reads.

    It is also raised for the name of a file in place of its settings, as in explainer=tve.

    Keys below are arguments of what a `_target_` names, which refuses those that it does not have. Files of experiments
    may have keys at the top that nothing reads any more after an override.

    Args:
        cfg: the config of a run.
        program: the config file of its program, which has the keys that the program reads.
    """
    own: Any = OmegaConf.load(program)
    groups = [
        str(group).rpartition("@")[2] for choice in own.defaults if isinstance(choice, DictConfig) for group in choice
    ]
    texts = [OmegaConf.to_yaml(node) for node in (cfg, HydraConfig.get())]
    interpolated = re.findall(r"\$\{(?:[\w.]+:)?\.*(\w+)", " ".join(texts))
    known = [*own, *groups, *OF_PARTS, *interpolated]
    added = re.findall(r"^\++(\w+)", "\n".join(HydraConfig.get().overrides.task), re.MULTILINE)
    unread = [(key, meant(key, known)) for key in added if key in cfg and key not in known]
    for name, settings in (cfg.get("tasks") or {}).items():
        unread += [(f"tasks.{name}.{key}", meant(str(key), OF_TASKS)) for key in settings if key not in OF_TASKS]
    for key, others in unread:
        raise InputError(f"no setting {key}: nothing reads it; {others}")
    for group, name in ((str(group), str(group).partition("@")[2]) for group in HydraConfig.get().runtime.choices):
        if name and isinstance(file := OmegaConf.select(cfg, name), str):
            folder = f"configs/{group.partition('@')[0]}"
            raise InputError(f"expected {group}={file}, which names a file in {folder}, got {name}={file}")
