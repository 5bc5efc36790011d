"""Explainability vectors, the difference of two models' weights, added to another model (Yoshikawa et al., 2025).

Weights are state dicts of one architecture. The arithmetic uses learned weights only. It leaves out
BatchNorm's counts and running statistics, because a difference of variances may be negative. State dicts have no head,
because a head is fixed and belongs to its task.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from explainers.saved.weights import State, check_alike

FLATTEST = 1e-6


def subtract(explaining: State, predicting: State) -> dict[str, Tensor]:
    """Compute the explainability vector τ = θ_ft* − θ_ft of two models of one task.

    >>> subtract({"weight": torch.tensor(3.0)}, {"weight": torch.tensor(1.0)})
    {'weight': tensor(2.)}

    Raises:
        InputError: if the state dicts are of different architectures, as the other functions here.
    """
    check_alike(explaining, predicting)
    return {name: explaining[name] - value for name, value in select_learned(predicting).items()}


def select_learned(state: State) -> dict[str, Tensor]:
    """The part of a state dict that gradients change: no integers, and no running statistics of BatchNorm.

    >>> state = {"weight": torch.zeros(1), "running_var": torch.ones(1), "num_batches_tracked": torch.tensor(7)}
    >>> list(select_learned(state))
    ['weight']
    """
    statistics = ("running_mean", "running_var")
    return {name: value for name, value in state.items() if value.is_floating_point() and not name.endswith(statistics)}


def transfer(base: State, onto: State, tau: State, lambda_1: float = 1.0, lambda_2: float = 1.0) -> dict[str, Tensor]:
    """θ_base + λ₁ (θ_onto − θ_base) + λ₂ τ: the weights of the target task's model, made self-explaining.

    With λ₁ = 1 and λ₂ = 0 the result is bitwise equal to `onto`. Entries that are not learned come from `onto`.

    >>> base, onto, tau = ({"weight": torch.tensor(value)} for value in (1.0, 3.0, 10.0))
    >>> transfer(base, onto, tau, lambda_1=0.5, lambda_2=2.0)  # 1 + 0.5 · (3 − 1) + 2 · 10
    {'weight': tensor(22.)}

    Args:
        base: θ_base, the weights of the base model.
        onto: θ_onto, the weights of the target task's prediction-only model.
        tau: τ, the explainability vector of the source task.
        lambda_1: λ₁, the weight of the target task.
        lambda_2: λ₂, the weight of the explainability vector.
    """
    check_alike(base, onto)
    check_alike(select_learned(onto), tau)
    transferred = dict(onto)
    for name, difference in tau.items():
        if lambda_1 != 1:
            transferred[name] = torch.lerp(base[name], onto[name], lambda_1)
        if lambda_2 != 0:
            transferred[name] = transferred[name] + lambda_2 * difference
    return transferred


def combine(vectors: Sequence[State], ratios: Sequence[float]) -> State:
    """Σ_m r_m τ_m, a weighted sum of explainability vectors (Equation 1); one vector of ratio 1 is returned as it is.

    >>> first, second = {"weight": torch.tensor(2.0)}, {"weight": torch.tensor(10.0)}
    >>> combine([first, second], [1.0, 0.5])
    {'weight': tensor(7.)}
    """
    first, *others = vectors
    for other in others:
        check_alike(first, other)
    if not others and ratios[0] == 1:
        return first
    pairs = list(zip(vectors, ratios, strict=True))
    return {name: torch.stack([ratio * vector[name] for vector, ratio in pairs]).sum(0) for name in first}


def keep_largest(tau: State, share: float) -> State:
    """Keep a share of the entries of a vector that are not 0, the largest ones, and set the others to 0.

    Of n entries, ⌈share · n⌉ are kept, and those as large as the smallest of them.

    >>> keep_largest({"weight": torch.tensor([0.0, 3.0, -4.0, 1.0, 2.0])}, share=0.5)
    {'weight': tensor([ 0.,  3., -4.,  0.,  0.])}
    """
    sizes = torch.cat([value.abs().flatten() for value in tau.values()])
    sizes = sizes[sizes > 0].sort().values
    limit = sizes[-math.ceil(share * len(sizes) - 1e-6)]  # 0.07 · 100 is above 7 by rounding
    return {name: value * (value.abs() >= limit) for name, value in tau.items()}


def restoration(changed: Tensor, unchanged: Tensor, ridge: float = 1.0) -> Tensor:
    """Compute the map R, (D, D), with the least Σ |R e − ê|² + k |R − I|², by ridge regression towards the identity.

    A fixed head whose projection is multiplied by R computes logits from restored embeddings. Equal images determine R
    too: at least `FLATTEST` of the mean square counts as variance.

    >>> unchanged = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])
    >>> (restoration(2 * unchanged, unchanged, ridge=0.0) + 0).tolist()
    [[0.5, 0.0], [0.0, 0.5]]

    Args:
        changed: e, the embeddings of images by the model with the vector, (B, D).
        unchanged: ê, their embeddings by the model without it, (B, D).
        ridge: k, as a multiple of the mean variance Σ |e − mean e|² / D.
    """
    e = changed.double()
    spread = (e - e.mean(0)).square().sum().clamp(min=FLATTEST * e.square().sum())
    strength = ridge * spread / e.shape[1]
    identity = torch.eye(e.shape[1], dtype=e.dtype, device=e.device)
    change = torch.linalg.solve(e.mT @ e + strength * identity, e.mT @ (unchanged.double() - e)).mT
    return (identity + change).to(changed.dtype)


def cosine(first: State, second: State) -> float:
    """The cosine of the angle between two vectors, each of all weights of a state dict; NaN if one of them is 0.

    >>> first = {"weight": torch.tensor([3.0]), "bias": torch.tensor([4.0])}
    >>> cosine(first, {"weight": torch.tensor([1.0]), "bias": torch.tensor([0.0])})
    0.6
    """
    check_alike(first, second)
    lengths = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / lengths if lengths else math.nan


def _dot(first: State, second: State) -> float:
    """The scalar product of two vectors of weights, in double precision."""
    return sum((first[name].double() * second[name].double()).sum().item() for name in first)
