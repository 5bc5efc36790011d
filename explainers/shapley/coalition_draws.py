"""Random coalitions of patches: with sizes that are equally likely, or as the Shapley kernel weighs them."""

import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.runtime.sampling import uniform


def random_coalitions(index: Tensor, num_patches: int, count: int, seed: int) -> Tensor:
    """Draw `count` coalitions of each image: a size, uniform in 0 ... N, then that many patches, uniformly.

    Args:
        index: index of each image in the data set, (B,).
        num_patches: N.
        count: number of coalitions for each image.
        seed: a different one for every epoch, see `sampling.stream`.

    Returns:
        Boolean, (B, count, N); True for the patches in the coalition, which are visible.
    """
    size, order = _size_and_order(index, num_patches, count, seed)
    return order < (size * (num_patches + 1)).long()[..., None]


def shapley_coalitions(
    index: Tensor, num_patches: int, count: int, seed: int, paired: bool = True, power: float = 1.0
) -> Tensor:
    """Draw coalitions for which a least-squares fit gives the Shapley values (Charnes et al., 1988).

    First a size k in 1 ... N − 1, with a probability proportional to 1 / (k (N − k))^power, then k patches, uniformly.
    The other arguments and the result are those of `random_coalitions`; N is at least 2.

    Args:
        paired: make every second coalition the complement of the one before, which lowers the variance.
        power: 1 for the Shapley kernel; 1/2 has the smallest variance if the fit weighs coalitions by
            `shapley_weights`; 0 makes all sizes equally likely.

    For N = 4, the sizes 1, 2 and 3 have the probabilities 4/11, 3/11 and 4/11:

    >>> keep = shapley_coalitions(torch.tensor([0]), num_patches=4, count=11_000, seed=0)
    >>> (keep.sum(-1).flatten().bincount() / 1000).round().tolist()
    [0.0, 4.0, 3.0, 4.0]
    """
    check_coalitions(num_patches)
    draws, order = _size_and_order(index, num_patches, -(-count // 2) if paired else count, seed)
    cumulative = _size_density(num_patches, power).cumsum(0)
    keep = order < torch.searchsorted((cumulative / cumulative[-1]).to(draws), draws, right=True)[..., None] + 1
    return torch.stack([keep, ~keep], 2).flatten(1, 2)[:, :count] if paired else keep


def shapley_weights(keep: Tensor, power: float) -> Tensor:
    """Compute weights (...) with which coalitions (..., N), drawn with a `power`, stand for those of power 1.

    They are the ratios of the probabilities of the sizes with both powers, and have the expectation 1.

    >>> shapley_weights(torch.tensor([[True, False, False, False], [True, True, False, False]]), power=0).tolist()
    [1.0909..., 0.8181...]
    """
    num_patches = keep.shape[-1]
    wanted, drawn = (_size_density(num_patches, each) for each in (1.0, power))
    return ((wanted / wanted.sum()) / (drawn / drawn.sum())).float().to(keep.device)[keep.sum(-1) - 1]


def check_coalitions(num_patches: int) -> None:
    """Raise an InputError for a single patch, because its only coalitions are the empty one and the full one."""
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
