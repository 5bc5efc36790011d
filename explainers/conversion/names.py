"""Names of weights in timm, and the names that other libraries give the same weights."""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Table = Sequence[tuple[str, str | Callable[[re.Match[str]], str] | None]]
"""Patterns of names, and what replaces them, in this order; None drops the weights whose names match."""

Weights = dict[str, Tensor]


def renamed(weights: Mapping[str, Tensor], table: Table) -> Weights:
    """Rename weights by a table.

    >>> renamed({"ln_1.bias": torch.zeros(1), "step": torch.zeros(1)}, [(r"ln_(\\d)", r"norm\\1"), ("step", None)])
    {'norm1.bias': tensor([0.])}
    """
    found = {}
    for old, weight in weights.items():
        name: str | None = old
        for pattern, replacement in table:
            if name is None or replacement is None:
                name = None if name is None or re.search(pattern, name) else name
            else:
                name = re.sub(pattern, replacement, name)
        if name is not None:
            found[name] = weight
    return found


def joined(weights: Mapping[str, Tensor], parts: Sequence[str], whole: str) -> Weights:
    """Join weights whose layers timm computes as one: `a.q.weight`, `a.k.weight`, `a.v.weight` → `a.qkv.weight`.

    Args:
        weights: name → weight.
        parts: names of the layers, in the order of their outputs in the joined layer.
        whole: name of the joined layer.

    >>> joined({"q.weight": torch.zeros(1, 2), "v.weight": torch.ones(1, 2)}, ["q", "v"], "qv")
    {'qv.weight': tensor([[0., 0.],
            [1., 1.]])}
    """
    rest = dict(weights)
    for name in weights:
        first = re.fullmatch(rf"(.*\.)?{re.escape(parts[0])}\.(weight|bias)", name)
        if first:
            prefix, kind = first[1] or "", first[2]
            rest[f"{prefix}{whole}.{kind}"] = torch.cat([rest.pop(f"{prefix}{part}.{kind}") for part in parts])
    return rest
