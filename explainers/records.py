"""Records beside every result: the software and devices that made it, how two configs differ, and whole files."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "timm",
    "torchmetrics",
    "hydra-core",
    "omegaconf",
    "wandb",
    "ffcv",
    "numpy",
)


def versions() -> dict[str, str | None]:
    """The installed version of every package that can change a result."""

    def find(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: find(package) for package in PACKAGES}


def devices() -> list[str]:
    """The GPUs of this machine, or the threads of its CPU."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [
        f"CPU, {torch.get_num_threads()} threads"
    ]


def first_difference(old: Any, new: Any, key: str = "") -> str | None:
    """`key: old → new` of the first key whose values differ in two nested configs; None when they are equal.

    >>> first_difference({"seed": 0, "explainer": {"hops": [1]}}, {"seed": 0, "explainer": {"hops": [2]}})
    'explainer.hops: [1] → [2]'
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(new.keys() | old.keys()):
            found = first_difference(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
            if found:
                return found
        return None
    return None if old == new else f"{key}: {old} → {new}"


@rank_zero_only
def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old text or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)
