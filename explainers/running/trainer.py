"""Lightning's trainer of a run: its device, precision and callbacks."""

import functools
from typing import Any

import torch
from hydra.utils import instantiate
from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.running.signals import ignore_lightnings_signals


def build_all(group: DictConfig | None) -> list[Any]:
    """Instantiate every object of a config group, such as `callbacks`; entries that are null are skipped.

    >>> build_all(OmegaConf.create({"first": {"_target_": "builtins.dict", "size": 3}, "second": None}))
    [{'size': 3}]
    """
    return [instantiate(node) for node in (group or {}).values() if node is not None]


def build_trainer(settings: DictConfig, **parts: Any) -> Trainer:
    """Build the trainer of the settings with callbacks, loggers and plugins that leaves signals to `signals.py`."""
    trainer = instantiate(settings, accelerator=accelerator_of(settings.accelerator), **parts)
    ignore_lightnings_signals(trainer)
    return trainer


@functools.cache  # the line is printed once
def accelerator_of(wanted: str) -> str:
    """Lightning's accelerator for `trainer.accelerator`: the CPU instead of Apple's GPU (MPS).

    Metrics are summed and random numbers are drawn in float64, which MPS does not have.

    Raises:
        InputError: if it is mps, or gpu on a machine with an Apple GPU.
    """
    if wanted == "mps" or wanted == "gpu" and torch.backends.mps.is_available():
        raise InputError(
            f"expected trainer.accelerator=cpu on this machine, got {wanted}: Apple's GPUs (MPS) have no float64, in"
            " which metrics are summed"
        )
    if wanted != "auto" or not torch.backends.mps.is_available():
        return wanted
    rank_zero_only(print)("computing on the CPU, because Apple's GPU (MPS) has no float64, in which metrics are summed")
    return "cpu"


def fastest_precision(accelerator: str) -> str:
    """Lightning's name of the precision: bf16 autocast if the hardware computes it, else float32.

    Emulated bf16 is ten times slower than float32.

    Args:
        accelerator: Lightning's name of the device, such as auto, cpu or gpu.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    cpu = accelerator in ("auto", "cpu") and hasattr(torch.cpu, "get_capabilities")
    features = torch.cpu.get_capabilities() if cpu else {}
    return "bf16-mixed" if features.get("amx_bf16") or features.get("avx512_bf16") else "32-true"


OmegaConf.register_new_resolver("fastest_precision", fastest_precision, replace=True)
