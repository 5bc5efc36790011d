"""Arithmetic on weights that moves the skill of explaining itself from one model to another (Yoshikawa et al., 2025).

All functions take and give state dicts of one architecture. Only what was learned takes part: no counts of batches,
and no statistics of them either, for a variance less another may be negative. Nor does the head, which is fixed and
belongs to the task.
"""

import torch
from torch import Tensor

from explainers.training.state_dicts import State, check_alike


def vector(explaining: State, predicting: State) -> dict[str, Tensor]:
    """The explainability vector τ = θ_ft* − θ_ft of two models of one task, of which the first explains itself, too.

    Raises:
        InputError: if they are not of one architecture; it names the first key that differs.
    """
    check_alike(explaining, predicting)
    return {name: explaining[name] - value for name, value in learned(predicting).items()}


def learned(state: State) -> dict[str, Tensor]:
    """Of a state dict what training with gradients changes: neither integers nor the statistics of BatchNorm."""
    statistics = ("running_mean", "running_var")
    return {name: value for name, value in state.items() if value.is_floating_point() and not name.endswith(statistics)}


def transfer(
    base: State, target: State, vector: State, lambda_1: float = 1.0, lambda_2: float = 1.0
) -> dict[str, Tensor]:
    """θ_base + λ₁ (θ_ft − θ_base) + λ₂ τ: the target's model with the skill of the vector.

    With λ₁ = 1 and λ₂ = 0 it is the target's, bit for bit. What takes no part in the arithmetic is the target's.

    Raises:
        InputError: if they are not of one architecture; it names the first key that differs.
    """
    check_alike(base, target)
    check_alike(learned(target), vector)
    moved = dict(target)
    for name, difference in vector.items():
        if lambda_1 != 1:
            moved[name] = torch.lerp(base[name], target[name], lambda_1)
        if lambda_2 != 0:
            moved[name] = moved[name] + lambda_2 * difference
    return moved


def cosine(first: State, second: State) -> float:
    """The cosine of two vectors as one long one each; NaN where one of them is 0.

    Raises:
        InputError: if they are not of one architecture; it names the first key that differs.
    """
    check_alike(first, second)
    product, squares = 0.0, [0.0, 0.0]
    for name, value in first.items():
        one, other = value.double().flatten(), second[name].double().flatten()
        product += (one @ other).item()
        squares = [squares[0] + (one @ one).item(), squares[1] + (other @ other).item()]
    length = (squares[0] * squares[1]) ** 0.5
    return product / length if length else float("nan")
