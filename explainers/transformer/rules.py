"""Operations of a transformer that keep their value and get another gradient.

This file writes rules of attribution, such as DecompX or layer-wise relevance propagation, as changed gradients: the
relevance of a tensor x is x times its changed gradient. So one ordinary backward pass propagates the relevance for V
functionals at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import check_choices, check_range


@dataclass(frozen=True)
class Rules:
    """How the backward pass treats nonlinear and shared operations; the default rules compute plain gradients.

    Args:
        attention: `frozen` treats the attention weights as constants. `halved` halves the gradients of both factors of
            a product, so that values get half of the gradient, and queries and keys a quarter each (AttnLRP).
        norm: `frozen` treats the scale of LayerNorm and RMSNorm as a constant, but not the mean of LayerNorm.
        activation: `ratio` replaces f(x) by x · c with the constant c = f(x) / x, halves the gradients of products of
            two branches (SwiGLU), and treats sigmoid gates as constants.
        linear: `positive` is the α = 1 rule of LRP, which shares the relevance of outputs among positive summands.
        residual: how a skip connection y = x + f(x) shares the relevance of y. `sum` shares it by the values, as the
            gradient does. `signed` weights summands that have the sign of y by 1 + γ (ResLRP). `conserved` keeps the
            sum over all tokens (Transformer Attribution, Equations 9 and 10).
        gamma: γ of `signed`, at least 0.
    """

    attention: Literal["gradient", "frozen", "halved"] = "gradient"
    norm: Literal["gradient", "frozen"] = "gradient"
    activation: Literal["gradient", "ratio"] = "gradient"
    linear: Literal["gradient", "positive"] = "gradient"
    residual: Literal["sum", "signed", "conserved"] = "sum"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_choices(vars(self), get_type_hints(Rules))
        check_range(0, gamma=self.gamma)


def scale_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    """Return x; its gradient is multiplied by `factor`."""
    return x.detach() + factor * (x - x.detach())


def layer_norm(x: Tensor, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Compute LayerNorm with a constant standard deviation; the mean keeps its gradient. Arguments of F.layer_norm."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * (centred.detach().square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Tensor, shape: list[int], weight: Any = None, eps: float | None = None) -> Tensor:
    """Compute RMSNorm with a constant scale. Arguments of F.rms_norm."""
    mean_square = x.detach().square().mean(-1, keepdim=True)
    y = x * (mean_square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return y if weight is None else y * weight


def activation(x: Tensor, y: Tensor) -> Tensor:
    """Return y = f(x) with the gradient of x · c, where c = f(x) / x is a constant, and 1/2 at 0 as of GELU."""
    tiny = x.abs() < 1e-6
    return x * torch.where(tiny, 0.5, y / x.masked_fill(tiny, 1)).detach()


def linear(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Return y = x Wᵀ + b with the gradient of the α = 1 rule: R_j = Σ_i (x_j w_ij)⁺ / Σ_k (x_k w_ik)⁺ · R_i."""
    positive = F.linear(x.clamp(min=0), weight.clamp(min=0)) + F.linear(x.clamp(max=0), weight.clamp(max=0))
    empty = positive.detach() < 1e-9  # an output without positive summands passes no relevance on
    share = (y / positive.masked_fill(empty, 1)).masked_fill(empty, 0).detach()
    return y.detach() + share * (positive - positive.detach())


def signed_residual(x: Tensor, update: Tensor, gamma: float) -> Tensor:
    """Return y = x + u for the update u; a summand that has the sign of y gets 1 + γ times the weight (ResLRP).

    R_x = w_x x / (w_x x + w_u u) · R_y, with w_z = 1 + γ [z y > 0]. Both summands are new nodes of the graph, so the
    gradient that x gets through u is not scaled by w_x.
    """
    y = (x + update).detach()
    weights = [1 + gamma * (summand.detach() * y > 0).to(y) for summand in (x, update)]
    total = weights[0] * x.detach() + weights[1] * update.detach()
    share = torch.where(total == 0, 1, y / total.masked_fill(total == 0, 1))
    return scale_gradient(x, share * weights[0]) + scale_gradient(update, share * weights[1])


class _ConservedResidual(torch.autograd.Function):
    """x + update, with gradients that preserve the sum of the relevance over each image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor) -> Tensor:
        ctx.save_for_backward(x, update)
        return x + update

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gradient, summands = gradients[0], ctx.saved_tensors
        dims = tuple(range(1, gradient.dim()))
        sums = [(summand * gradient).sum(dims, keepdim=True) for summand in summands]
        total, size = sums[0] + sums[1], sums[0].abs() + sums[1].abs()
        # R · |a| / (|a| + |b|) · (a + b) / a, in which |a| / a is the sign of a
        factors = [total * part.sign() / size.clamp(min=1e-12) for part in sums]
        return gradient * factors[0], gradient * factors[1]


def conserved_residual(x: Tensor, update: Tensor) -> Tensor:
    """Return x + update; one factor per image scales the relevance of a summand (Transformer Attribution, Eqs. 9, 10).

    Let a and b be the relevance of x and of `update`, summed over an image. After scaling, x has |a| / (|a| + |b|) of
    a + b, and `update` has the rest.
    """
    return _ConservedResidual.apply(x, update)  # type: ignore[no-untyped-call, no-any-return]


def attention_factors(rules: Rules, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with the gradients that the rules give them."""
    if rules.attention == "halved":
        return scale_gradient(q, 0.25), scale_gradient(k, 0.25), scale_gradient(v, 0.5)
    return (q.detach(), k.detach(), v) if rules.attention == "frozen" else (q, k, v)


def residual(rules: Rules, x: Tensor, update: Tensor) -> Tensor:
    """Return x + update, the result of a skip connection, under the rules `signed` and `conserved`."""
    return signed_residual(x, update, rules.gamma) if rules.residual == "signed" else conserved_residual(x, update)


def _linear(rules: Rules, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = F.linear(x, weight, bias)
    return linear(x, weight, y) if rules.linear == "positive" else y


def _layer_norm(rules: Rules, *args: Any, **options: Any) -> Tensor:
    return (layer_norm if rules.norm == "frozen" else F.layer_norm)(*args, **options)


def _rms_norm(rules: Rules, *args: Any, **options: Any) -> Tensor:
    return (rms_norm if rules.norm == "frozen" else F.rms_norm)(*args, **options)


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule of an activation function f that is 0 at 0."""

    def compute(rules: Rules, x: Tensor, *args: Any, **options: Any) -> Tensor:
        in_place = any(each is True for each in (*args, *options.values()))  # none has another option of this kind
        y = function(x.clone() if in_place else x, *args, **options)
        return activation(x, y) if rules.activation == "ratio" else y

    return compute


def _sigmoid(rules: Rules, x: Tensor) -> Tensor:
    return x.sigmoid().detach() if rules.activation == "ratio" else x.sigmoid()


def _multiply(rules: Rules, x: Tensor, other: Any) -> Tensor:
    both = isinstance(other, Tensor) and x.shape == other.shape and x.requires_grad and other.requires_grad
    if both and rules.activation == "ratio":
        return scale_gradient(x, 0.5) * scale_gradient(other, 0.5)
    return torch.mul(x, other)


ACTIVATIONS = (F.gelu, F.silu, F.relu, F.hardtanh, F.leaky_relu, F.elu, F.celu, F.selu, F.mish, F.hardswish)
"""Activation functions of timm's transformers that are 0 at 0; ReLU6 calls F.hardtanh."""

RULED: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    **{function: _elementwise(function) for function in ACTIVATIONS},
    torch.sigmoid: _sigmoid,
    torch.Tensor.sigmoid: _sigmoid,
    torch.Tensor.mul: _multiply,
}
"""Operation → function of the rules and its arguments, which computes it with the gradient that the rules give it."""
