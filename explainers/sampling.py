"""Random numbers that depend on the sample only, not on the process that draws them.

The draws for an image and an epoch are the same in one process and in several. A resumed run repeats the draws of an
uninterrupted run, and there is no generator state to save.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError

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


def random_coalitions(index: Tensor, num_patches: int, count: int, seed: int) -> Tensor:
    """Draw `count` coalitions of each image: a size, uniform in 0 ... N, then that many patches, uniformly.

    Args:
        index: index of each image in the data set, (B,).
        num_patches: N.
        count: number of coalitions for each image.
        seed: a different one for every epoch, see `stream`.

    Returns:
        Boolean, (B, count, N); True for the patches in the coalition, which are visible.

    Of 3000 coalitions of 2 patches, about 1000 have each of the sizes 0, 1 and 2:

    >>> sizes = random_coalitions(torch.tensor([0]), num_patches=2, count=3000, seed=0).sum(-1)
    >>> (sizes.flatten().bincount() / 1000).round().tolist()
    [1.0, 1.0, 1.0]
    """
    size, order = _size_and_order(index, num_patches, count, seed)
    return order < (size * (num_patches + 1)).long()[..., None]


def shapley_coalitions(
    index: Tensor, num_patches: int, count: int, seed: int, paired: bool = True, power: float = 1.0
) -> Tensor:
    """Draw coalitions for which a least-squares fit gives the Shapley values (Charnes et al., 1988).

    First a size k in 1 ... N − 1, with a probability proportional to 1 / (k (N − k))^power, then k patches, uniformly.

    Args:
        index: index of each image in the data set, (B,).
        num_patches: N, at least 2.
        count: number of coalitions for each image.
        seed: a different one for every epoch, see `stream`.
        paired: make every second coalition the complement of the one before, which lowers the variance.
        power: 1 for the Shapley kernel; 1/2 has the smallest variance if the fit weighs coalitions by
            `shapley_weights`; 0 makes all sizes equally likely.

    Returns:
        Boolean, (B, count, N); True for the patches in the coalition, which are visible.

    Raises:
        InputError: for a single patch, because its only coalitions are the empty one and the full one.

    For N = 4, the sizes 1, 2 and 3 have the probabilities 4/11, 3/11 and 4/11:

    >>> keep = shapley_coalitions(torch.tensor([0]), num_patches=4, count=11_000, seed=0)
    >>> torch.equal(keep[:, 1::2], ~keep[:, ::2])
    True
    >>> (keep.sum(-1).flatten().bincount() / 1000).round().tolist()
    [0.0, 4.0, 3.0, 4.0]
    """
    _check_coalitions(num_patches)
    draws, order = _size_and_order(index, num_patches, -(-count // 2) if paired else count, seed)
    cumulative = _size_density(num_patches, power).to(index.device).cumsum(0)
    keep = order < torch.searchsorted(cumulative / cumulative[-1], draws, right=True)[..., None] + 1
    return torch.stack([keep, ~keep], 2).flatten(1, 2)[:, :count] if paired else keep


def region_coalitions(index: Tensor, num_patches: int, count: int, seed: int) -> Tensor:
    """Draw coalitions of a few coherent regions: the patches where a smooth random field is highest.

    The field interpolates independent numbers, one for 2 × 2 patches. So a coalition contains most patches of some
    objects and few of others, and its embedding says more about them than that of patches drawn one by one.

    Args:
        index: index of each image in the data set, (B,).
        num_patches: N, a square number of at least 4.
        count: number of coalitions for each image.
        seed: a different one for every epoch, see `stream`.

    Returns:
        Boolean, (B, count, N); True for the patches in the coalition. Sizes are uniform in 1 ... N − 1.

    Raises:
        InputError: for a single patch.

    >>> region_coalitions(torch.arange(500), num_patches=9, count=2, seed=0).sum(-1).unique().tolist()
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    _check_coalitions(num_patches)
    side, cells = math.isqrt(num_patches), math.ceil(math.isqrt(num_patches) / 2) + 3
    draw = torch.arange(cells**2 + 1, device=index.device)
    coalition = index[:, None] * count + torch.arange(count, device=index.device)
    draws = uniform(coalition[..., None] * len(draw) + draw, seed)  # (B, count, cells² + 1)
    coarse = draws[..., 1:].flatten(0, 1).unflatten(-1, (1, cells, cells))
    # The interpolation varies more at its border, which would be drawn first
    field = F.interpolate(coarse, scale_factor=2, mode="bicubic")[..., 3 : 3 + side, 3 : 3 + side]
    field = field.reshape(*coalition.shape, num_patches)
    size = 1 + (draws[..., :1] * (num_patches - 1)).long()
    return field.argsort(-1, descending=True).argsort(-1) < size


def shapley_weights(keep: Tensor, power: float) -> Tensor:
    """Compute the weights with which coalitions of `shapley_coalitions` with any `power` stand for those of power 1.

    Args:
        keep: coalitions of 1 to N − 1 patches, boolean (..., N).
        power: the power that they were drawn with.

    Returns:
        Ratio of the probabilities of the size with both powers, with expectation 1: (...).

    >>> shapley_weights(torch.tensor([[True, False, False, False], [True, True, False, False]]), power=0).tolist()
    [1.0909..., 0.8181...]
    """
    num_patches = keep.shape[-1]
    wanted, drawn = (_size_density(num_patches, each).to(keep.device) for each in (1.0, power))
    return ((wanted / wanted.sum()) / (drawn / drawn.sum()))[keep.sum(-1) - 1].float()


def _check_coalitions(num_patches: int) -> None:
    if num_patches < 2:
        raise InputError(f"expected coalitions of at least 2 patches, got {num_patches}: take smaller patches")


def _size_density(num_patches: int, power: float) -> Tensor:
    """The probabilities of the sizes 1 ... N − 1, up to a factor."""
    sizes = torch.arange(1, num_patches, dtype=torch.double)
    return (sizes * (num_patches - sizes)) ** -power


def _size_and_order(index: Tensor, num_patches: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw for each coalition a number in [0, 1), (B, count), and a random rank of every patch, (B, count, N)."""
    coalition = index[:, None] * count + torch.arange(count, device=index.device)
    counter = coalition[..., None] * (num_patches + 1) + torch.arange(num_patches + 1, device=index.device)
    draws = uniform(counter, seed)
    return draws[..., 0].contiguous(), draws[..., 1:].argsort(dim=-1, stable=True).argsort(-1)
