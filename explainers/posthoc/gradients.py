"""Input × Gradient, class activation maps and FullGrad, on the tokens that enter each layer of a transformer."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from explainers.errors import InputError, checks_choices
from explainers.masking import PatchGrid
from explainers.posthoc.layerwise import PLUS, Layerwise, sum_of
from explainers.posthoc.white_box import Gradients, Output
from explainers.target import TargetModel
from explainers.transformer.blocks import blocks_of
from explainers.transformer.recording import Record


def input_x_gradient(tokens: Tensor, gradient: Tensor) -> Tensor:
    """Σ_c x_c ∂y/∂x_c of each token (SkipPLUS, Equation 1): tokens (B, ..., D), gradient (B, V, ..., D) → (B, V, ...).

    >>> import torch
    >>> input_x_gradient(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[[3.0, 4.0]]]])).tolist()
    [[[11.0]]]
    """
    return (tokens[:, None] * gradient).sum(-1)


def cam(features: Tensor, gradient: Tensor) -> Tensor:
    """Grad-CAM before its ReLU (Selvaraju et al., 2017, Equation 2): Σ_c w_c x_c, w_c the mean gradient of channel c.

    Args:
        features: x, (B, ..., D).
        gradient: (B, V, ..., D).

    Returns:
        (B, V, ...).
    """
    positions = tuple(range(2, gradient.dim() - 1))
    return input_x_gradient(features, gradient.mean(positions, keepdim=True))


def x_grad_cam(features: Tensor, gradient: Tensor) -> Tensor:
    """XGrad-CAM with w_c = Σ |x_c| ∂y/∂x_c / Σ |x_c| over positions; |x_c| instead of x_c, because features of
    transformers have both signs (Fu et al., 2020, Equation 8).

    Args:
        features: x, (B, ..., D).
        gradient: (B, V, ..., D).

    Returns:
        (B, V, ...).
    """
    positions = tuple(range(2, gradient.dim() - 1))
    size = features[:, None].abs()
    weights = (gradient * size).sum(positions, keepdim=True) / (size.sum(positions, keepdim=True) + 1e-7)
    return input_x_gradient(features, weights)


class InputXGradient(Layerwise):
    """Input × Gradient of the tokens that enter a layer (SkipPLUS, Equation 1). With PLUS it is CAT."""

    linear = True

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        tokens = record.inputs[start:]
        pairs = zip(tokens, gradients(tokens), strict=True)
        return [self.on_grid(input_x_gradient(x, gradient)) for x, gradient in pairs]


class AttIxG(Layerwise):
    """Input × Gradient times the attention that a token gets, AttnFrom (SkipPLUS, Section 3.4). With PLUS it is AttCAT.

    Args:
        target: the model to explain, a timm transformer with global attention.
        grid: the patches that are explained.
        output: what is explained, the `logit` or the `probability` of the class.
        layer: the layer whose map is the heatmap.
        next_input: weigh the input of the next layer with the attention of a layer, as SkipPLUS's code does; the last
            layer then has no map. Otherwise its own input, as AttCAT does.
    """

    attention = True
    linear = True

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layer: int = 0,
        next_input: bool = False,
    ) -> None:
        super().__init__(target, grid, output, layer)
        if next_input and self.start == len(blocks_of(target)) - 1:
            raise InputError(f"expected a layer before the last one of {target.name}, whose next layer has an input")
        self.next_input = next_input

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        tokens = record.inputs[start + self.next_input :]
        attention = record.attention[start : start + len(tokens)]
        return [
            self.on_grid(input_x_gradient(x, gradient) * weights.mean((1, 2))[:, None])
            for x, gradient, weights in zip(tokens, gradients(tokens), attention, strict=True)
        ]


class GradCAM(Layerwise):
    """Grad-CAM without its ReLU (see `relu`), on the tokens that enter a layer, by default the last one.

    Args:
        target: the model to explain, a timm transformer.
        grid: the patches that are explained.
        output: what is explained, the `logit` or the `probability` of the class.
        layer: the layer whose map is the heatmap.
        relu: set negative values to 0, as Grad-CAM does for single classes; SkipPLUS sums maps with both signs.
    """

    weighted: Callable[[Tensor, Tensor], Tensor] = staticmethod(cam)

    @checks_choices
    def __init__(
        self, target: TargetModel, grid: PatchGrid, output: Output = "logit", layer: int = -1, relu: bool = False
    ) -> None:
        super().__init__(target, grid, output, layer)
        self.relu = relu
        self.linear = not relu

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        tokens = record.inputs[start:]
        maps = [self.weighted(x, gradient) for x, gradient in zip(tokens, gradients(tokens), strict=True)]
        return [self.on_grid(scores.clamp(min=0) if self.relu else scores) for scores in maps]


class XGradCAM(GradCAM):
    """XGrad-CAM on the tokens that enter a layer, see `x_grad_cam`; with PLUS it is XGrad-CAM+ of LibraGrad."""

    weighted = staticmethod(x_grad_cam)


class FullGrad(InputXGradient):
    """Input × Gradient of a layer's input plus bias × gradient of all later biases (Srinivas & Fleuret, 2019).

    With PLUS and SkipPLUS it is FullGrad+, in which each bias counts once (SkipPLUS, Equations 5 and 6). Under frozen
    rules the scores of all tokens and the constant biases of the head sum to the class score.
    """

    biases = True

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        maps, bias_maps = self._maps(record, gradients, start)
        return [layer_map + sum_of(bias_maps[i:]) for i, layer_map in enumerate(maps)]

    def plus(self, record: Record, gradients: Gradients, start: int) -> Tensor:
        maps, bias_maps = self._maps(record, gradients, start)
        return sum_of(maps + bias_maps)

    def _maps(self, record: Record, gradients: Gradients, start: int) -> tuple[list[Tensor], list[Tensor]]:
        """The maps of the inputs, and the summed maps of the biases, of each layer from `start` on: (B, V, P, P)."""
        tokens = record.inputs[start:]
        # Layers after the pooling, or of relative positions, have no tokens: their biases belong to no patch
        of_tokens = tokens[0].shape[:-1]
        pairs = [[pair for pair in layer if pair[0].shape[:-1] == of_tokens] for layer in record.biases[start:]]
        remaining = iter(gradients([*tokens, *(output for layer in pairs for output, _ in layer)]))
        scores = [input_x_gradient(x, next(remaining)) for x in tokens]
        of_biases = [  # 0 for a layer without biases
            sum_of([0 * of_input, *(next(remaining) @ bias for _, bias in layer)])
            for of_input, layer in zip(scores, pairs, strict=True)
        ]
        return [self.on_grid(of_input) for of_input in scores], [self.on_grid(of_bias) for of_bias in of_biases]


class CAT(PLUS):
    """Class Activation Tokens: Input × Gradient of all layers (SkipPLUS, Section 3.4)."""

    @checks_choices
    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, partial(InputXGradient, output=output))


class AttCAT(PLUS):
    """Attentive Class Activation Tokens: AttIxG of all layers (SkipPLUS, Section 3.4; Qiang et al., 2022)."""

    @checks_choices
    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, partial(AttIxG, output=output))
