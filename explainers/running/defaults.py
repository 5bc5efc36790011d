"""Settings that follow from the model, which is built without weights, and from the machine."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn

from explainers.errors import InputError
from explainers.learned.trunk import default_blocks, space_blocks
from explainers.models import TargetModel
from explainers.models.fetching import is_in_timm, similar_targets
from explainers.models.heads import NoHead
from explainers.models.removal import supports_drop
from explainers.transformer.direct_paths import default_direct
from explainers.transformer.stage_paths import default_stages


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


def fastest_precision(accelerator: str) -> str:
    """Lightning's name of the precision: bf16 autocast if the hardware computes it, else float32.

    Emulated bf16 is ten times slower than float32.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    cpu = accelerator in ("auto", "cpu") and hasattr(torch.cpu, "get_capabilities")
    features = torch.cpu.get_capabilities() if cpu else {}
    return "bf16-mixed" if features.get("amx_bf16") or features.get("avx512_bf16") else "32-true"
