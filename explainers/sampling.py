"""Random numbers that depend on the sample, not on the process that draws them.

One process and several see the same draws for the same image and epoch, and a resumed run repeats those of an
uninterrupted one, with no generator state to save.
"""

import torch
from torch import Tensor

_MULTIPLIERS = 0x7FEB352D, 0x846CA68B  # of Chris Wellons' "lowbias32" integer hash
_UINT32 = 0xFFFFFFFF


def uniform(counter: Tensor, seed: int) -> Tensor:
    """One number in [0, 1) for every integer of `counter`: a hash, so that equal inputs give equal numbers."""
    bits = (_mix(counter & _UINT32) + (counter >> 32) + (seed * 0x9E3779B9 & _UINT32)) & _UINT32
    return _mix(bits).double() / 2**32


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
