"""Propagation of relevance: Input × Gradient under rules that change the gradient (see `rules`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.gradients import FullGrad, InputXGradient
from explainers.posthoc.layerwise import PLUS
from explainers.posthoc.white_box import Output, WhiteBox
from explainers.transformer.blocks import find_blocks
from explainers.transformer.rules import Rules

FROZEN = Rules(attention="frozen", norm="frozen", activation="ratio")
"""Rules under which a model is linear in its tokens: attention, scales of normalisations, GELU(x) / x are constants."""
LRP_RULES = Rules(attention="halved", norm="frozen", activation="ratio", linear="positive", residual="conserved")
"""The rules of Transformer Attribution (Chefer et al., CVPR 2021, Section 3.2). The paper has no rule for LayerNorm;
its general rule would lose all relevance there, because scaling the tokens does not change LayerNorm's output."""


class LRP(InputXGradient):
    """Layer-wise relevance propagation by the α = 1 rule (Binder et al., 2016; rules of Chefer et al., CVPR 2021)."""

    rules = LRP_RULES
    linear = False  # which summands are positive depends on v


class ConservativeLRP(InputXGradient):
    """LRP with attention weights and the scale of LayerNorm as constants (Ali et al., ICML 2022)."""

    rules = Rules(attention="frozen", norm="frozen")


class DecompX(InputXGradient):
    """Propagates the decomposition of each token through all layers, without biases (Modarressi et al., ACL 2023).

    With attention, normalisation and GELU(x) / x as constants, the model is linear in its tokens. The share of a token
    in the output is then its Input × Gradient, so one backward pass gives the decompositions from all start layers.
    """

    rules = FROZEN


class AttnLRP(InputXGradient):
    """LRP with the softmax's own gradient and products shared in halves (Achtibat et al., ICML 2024)."""

    rules = Rules(attention="halved", norm="frozen", activation="ratio")


class ResLRP(InputXGradient):
    """AttnLRP whose skip connections give more relevance to a summand with the sign of the sum, see `Rules`.

    Args:
        gamma: γ, at least 0: such a summand counts (1 + γ)-fold. 0 is AttnLRP.
    """

    def __init__(
        self, target: TargetModel, grid: PatchGrid, output: Output = "logit", layer: int = 0, gamma: float = 1.0
    ) -> None:
        super().__init__(target, grid, output, layer)
        self.rules = Rules("halved", "frozen", "ratio", residual="signed", gamma=gamma)


def libra(of: Callable[..., WhiteBox]) -> Callable[..., Any]:
    """Give a method of plain gradients the rules `FROZEN` of LibraGrad and DecompX (Mehri et al., CVPR 2025).

    `of` is a function of `target` and `grid` that returns the method, and so is the result, which raises an InputError
    if the method has rules of its own, or no backward pass.
    """

    def build(target: TargetModel, grid: PatchGrid) -> WhiteBox:
        method = of(target=target, grid=grid)
        if not isinstance(method, WhiteBox) or method.rules != Rules() or method.ignores_classes:
            name = type(method).__name__
            raise InputError(f"Libra needs a method of plain gradients of tokens, such as XGradCAM; {name} is not one")
        find_blocks(target)  # raises an InputError for a CNN, whose stages have no rules
        method.rules = FROZEN
        return method

    return build


class LibraGrad(PLUS):
    """FullGrad+ with the frozen rules, of the class probability (Mehri et al., CVPR 2025)."""

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "probability") -> None:
        super().__init__(target, grid, libra(partial(FullGrad, output=output)))
