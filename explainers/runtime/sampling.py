"""Random numbers that depend on the sample alone, and not on the process that draws them.

The draws for an image and an epoch are the same in one process and in several. A resumed run draws the same numbers as
an uninterrupted one, without saving the state of a generator.
"""

from typing import Literal

import torch
from torch import Tensor

from explainers.runtime.modes import finest_dtype

_UINT32 = 0xFFFFFFFF


def uniform(counter: Tensor, seed: int) -> Tensor:
    """Hash every integer of `counter`, int64, to a number in [0, 1): equal inputs give equal numbers.

    Only the lowest 32 bits of the seed count. The numbers are float64, or float32 on devices without it.

    >>> draws = uniform(torch.tensor([3, 4, 3]), seed=0)
    >>> bool(draws[0] == draws[2]), bool(draws[0] == draws[1])
    (True, False)
    """
    bits = (_mix(counter & _UINT32) + (counter >> 32) + (seed * 0x9E3779B9 & _UINT32)) & _UINT32
    if finest_dtype(counter.device) == torch.float32:
        return (_mix(bits) >> 8).float() / 2**24  # which is exact, and below 1
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
"""Purpose → its first seed, and the step from one seed to the next.

Add a purpose as a new line (2³⁰, 1), then (2³⁰ + 2²⁸, 1), and so on; there is room for ten, and the other purposes keep
their seeds. `uniform` takes seeds modulo 2³². The first 2²⁸ seeds of all purposes differ (for `seed` < 2684).
"""


def stream(purpose: Purpose, seed: int, epoch: int) -> int:
    """Return a distinct seed for each purpose, seed and epoch, because equal seeds would give correlated draws.

    >>> stream("patches", seed=0, epoch=0), stream("hops", seed=0, epoch=0), stream("patches", seed=0, epoch=1)
    (0, 1, 4)
    """
    first, step = SEEDS[purpose]
    return first + step * (seed * 100_003 + epoch)


def _mix(bits: Tensor) -> Tensor:
    """Hash integers in [0, 2³²) one to one by Chris Wellons' "lowbias32"."""
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * multiplier) & _UINT32
    return bits ^ (bits >> 16)


def random_patches(index: Tensor, num_patches: int, count: int, seed: int) -> Tensor:
    """Draw `count` distinct patches of each image, uniformly.

    Args:
        index: index of each image in the data set, (B,).
        num_patches: N, the number of patches per image.
        count: number of patches to draw for each image, at most N.
        seed: a different one for every epoch, see `stream`.

    Returns:
        Patch numbers, int64, (B, count).

    The draws of image 1 do not depend on the other images of its batch:

    >>> patches = random_patches(torch.tensor([0, 1]), num_patches=9, count=4, seed=0)
    >>> len(set(patches[1].tolist())), torch.equal(patches[1:], random_patches(torch.tensor([1]), 9, 4, seed=0))
    (4, True)
    """
    counter = index[:, None] * num_patches + torch.arange(num_patches, device=index.device)
    return uniform(counter, seed).argsort(dim=-1, stable=True)[:, :count]  # stable: the same on every device
