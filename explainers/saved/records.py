"""Records for every result: software versions, devices, and differences between configs."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    *("torch", "torchvision", "lightning", "timm", "torchmetrics"),
    *("hydra-core", "omegaconf", "wandb", "ffcv", "numpy"),
)


def versions() -> dict[str, str | None]:
    """Return the installed version of every package that can change a result; None if it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def devices() -> list[str]:
    """Return the names of the GPUs, or the number of CPU threads if there is no GPU."""
    import torch  # here, because a command compares configs before it needs torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [
        f"CPU, {torch.get_num_threads()} threads"
    ]


def leaves(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key, after the prefix `key`, and the value of every leaf of nested mappings and lists.

    >>> list(leaves({"seed": 0, "explainer": {"hops": [1, 2]}}))
    [('seed', 0), ('explainer.hops.0', 1), ('explainer.hops.1', 2)]
    """
    if isinstance(config, Mapping | list):
        for name, value in config.items() if isinstance(config, Mapping) else enumerate(config):
            yield from leaves(value, f"{key}.{name}".lstrip("."))
    else:
        yield key, config


def first_difference(old: Any, new: Any, key: str = "") -> str | None:
    """Describe the first difference of two nested configs as `key: old → new`; None if they are equal.

    >>> first_difference({"seed": 0, "explainer": {"hops": [1]}}, {"seed": 0, "explainer": {"hops": [2]}})
    'explainer.hops: [1] → [2]'
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**new, **old}:
            difference = first_difference(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
            if difference:
                return difference
        return None
    return None if old == new else f"{key}: {_short(old)} → {_short(new)}"


def _short(value: Any) -> str:
    """Convert a value to text; a whole section, which one of the configs lacks, is cut to 80 characters."""
    text = str(value)
    return f"{text[:80]}..." if isinstance(value, dict) and len(text) > 80 else text
