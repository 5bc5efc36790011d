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
