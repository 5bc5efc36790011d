"""Random numbers that depend on the sample, not on the process that draws them.

One process and several see the same draws for the same image and epoch, and a resumed run repeats those of an
uninterrupted one, with no generator state to save.
"""

from typing import Literal

import torch
from torch import Tensor

from explainers.errors import InputError

_MULTIPLIERS = 0x7FEB352D, 0x846CA68B  # of Chris Wellons' "lowbias32" integer hash
_UINT32 = 0xFFFFFFFF


def uniform(counter: Tensor, seed: int) -> Tensor:
    """One number in [0, 1) for every integer of `counter`: a hash, so that equal inputs give equal numbers."""
    bits = (_mix(counter & _UINT32) + (counter >> 32) + (seed * 0x9E3779B9 & _UINT32)) & _UINT32
    return _mix(bits).double() / 2**32


def stream(purpose: Literal["patches", "hops", "crops", "coalitions"], seed: int, epoch: int) -> int:
    """A seed for every purpose and epoch: the same draws twice would be correlated."""
    return 4 * (seed * 100_003 + epoch) + ("patches", "hops", "crops", "coalitions").index(purpose)


def _mix(bits: Tensor) -> Tensor:
    for shift, multiplier in zip((16, 15), _MULTIPLIERS, strict=True):
        bits = ((bits ^ (bits >> shift)) * multiplier) & _UINT32
    return bits ^ (bits >> 16)


def random_patches(index: Tensor, num_patches: int, count: int, seed: int) -> Tensor:
    """`count` different patches of each image, uniform.

    Args:
        index: which image of the data set, (B,).
        seed: another one for every epoch.

    Returns:
        (B, count), in [0, num_patches).
    """
    counter = index[:, None] * num_patches + torch.arange(num_patches, device=index.device)
    return uniform(counter, seed).argsort(-1)[:, :count]


def random_coalitions(index: Tensor, num_patches: int, count: int, seed: int) -> Tensor:
    """Visible patches of each image, `count` times: a size uniform in 0 ... N, then that many patches, uniform.

    Args:
        index: which image of the data set, (B,).
        seed: another one for every epoch.

    Returns:
        Boolean, (B, count, N).
    """
    size, order = _size_and_order(index, num_patches, count, seed)
    return order < (size * (num_patches + 1)).long()[..., None]


def shapley_coalitions(index: Tensor, num_patches: int, count: int, seed: int, paired: bool = True) -> Tensor:
    """Coalitions S of the distribution that makes a least-squares fit the Shapley value (Charnes et al., 1988).

    A size k in 1 ... N − 1 with a probability proportional to 1 / (k (N − k)), then exactly k patches, uniform.

    Args:
        index, seed: as of `random_coalitions`.
        paired: every second coalition is the complement of the one before, which lowers the variance.

    Returns:
        Boolean, (B, count, N).

    Raises:
        InputError: for a single patch, which has no coalition but nothing and everything.
    """
    if num_patches < 2:
        raise InputError(f"Shapley coalitions need at least 2 patches, got {num_patches}: take smaller patches")
    drawn, order = _size_and_order(index, num_patches, -(-count // 2) if paired else count, seed)
    sizes = torch.arange(1, num_patches, device=index.device, dtype=torch.double)
    up_to = (1 / (sizes * (num_patches - sizes))).cumsum(0)
    keep = order < torch.searchsorted(up_to / up_to[-1], drawn, right=True)[..., None] + 1
    return torch.stack([keep, ~keep], 2).flatten(1, 2)[:, :count] if paired else keep


def _size_and_order(index: Tensor, num_patches: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """For each coalition a number in [0, 1), (B, count), and the rank of every patch, (B, count, N)."""
    coalition = index[:, None] * count + torch.arange(count, device=index.device)
    counter = coalition[..., None] * (num_patches + 1) + torch.arange(num_patches + 1, device=index.device)
    draws = uniform(counter, seed)
    return draws[..., 0].contiguous(), draws[..., 1:].argsort(-1).argsort(-1)
