"""Random numbers that depend on the sample only, not on the process that draws them.

The draws for an image and an epoch are the same in one process and in several. A resumed run repeats the draws of an
uninterrupted run, and there is no generator state to save.
"""

from typing import Literal

import torch
from torch import Tensor

_MULTIPLIERS = 0x7FEB352D, 0x846CA68B  # constants of the integer hash "lowbias32" by Chris Wellons
_UINT32 = 0xFFFFFFFF


def uniform(counter: Tensor, seed: int) -> Tensor:
    """Hash every integer of `counter` to a number in [0, 1): equal inputs give equal numbers.

    Args:
        counter: int64, any shape.
        seed: another seed gives other numbers.

    Returns:
        float64, the shape of `counter`.

    >>> draws = uniform(torch.tensor([3, 4, 3]), seed=0)
    >>> bool(draws[0] == draws[2]), bool(draws[0] == draws[1])
    (True, False)
    """
    bits = (_mix(counter & _UINT32) + (counter >> 32) + (seed * 0x9E3779B9 & _UINT32)) & _UINT32
    return _mix(bits).double() / 2**32


Purpose = Literal["patches", "hops", "crops", "coalitions", "dropout", "functionals"]
SEEDS: dict[Purpose, tuple[int, int]] = {
    "patches": (0, 4),
    "hops": (1, 4),
    "crops": (2, 4),
    "coalitions": (3, 4),
    "dropout": (-1, -2),
    "functionals": (-2, -2),
}
"""First seed of each purpose, and the step from one seed to the next.

A new purpose is a new line, which changes no other: (2³⁰, 1), the next one (2³⁰ + 2²⁸, 1), up to ten of them. `uniform`
takes seeds modulo 2³²; no two of the first 2²⁸ seeds of all purposes are equal (`seed` below 2684, any epoch).
"""


def stream(purpose: Purpose, seed: int, epoch: int) -> int:
    """Return a seed of its own for every purpose and epoch, because equal seeds would give correlated draws.

    >>> stream("patches", seed=0, epoch=0), stream("hops", seed=0, epoch=0), stream("patches", seed=0, epoch=1)
    (0, 1, 4)
    """
    first, step = SEEDS[purpose]
    return first + step * (seed * 100_003 + epoch)


def _mix(bits: Tensor) -> Tensor:
    """Hash integers in [0, 2³²) to integers in [0, 2³²); no two inputs have the same output."""
    for shift, multiplier in zip((16, 15), _MULTIPLIERS, strict=True):
        bits = ((bits ^ (bits >> shift)) * multiplier) & _UINT32
    return bits ^ (bits >> 16)


def random_patches(index: Tensor, num_patches: int, count: int, seed: int) -> Tensor:
    """Draw `count` different patches of each image, uniformly.

    Args:
        index: index of each image in the data set, (B,).
        num_patches: N.
        count: number of patches to draw for each image, at most N.
        seed: a different one for every epoch, see `stream`.

    Returns:
        int64, (B, count), in [0, num_patches).

    The draws of image 1 do not depend on the other images of its batch:

    >>> patches = random_patches(torch.tensor([0, 1]), num_patches=9, count=4, seed=0)
    >>> len(set(patches[1].tolist())), torch.equal(patches[1:], random_patches(torch.tensor([1]), 9, 4, seed=0))
    (4, True)
    """
    counter = index[:, None] * num_patches + torch.arange(num_patches, device=index.device)
    return uniform(counter, seed).argsort(dim=-1, stable=True)[:, :count]  # the same on every device
