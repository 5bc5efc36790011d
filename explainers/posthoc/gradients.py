"""Gradients, Input × Gradient and FullGrad, on the tokens that enter each layer of a transformer."""

from functools import partial
from typing import Literal

from torch import Tensor

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.layerwise import PLUS, Layerwise, add_maps
from explainers.posthoc.white_box import Gradients, Output, Reads
from explainers.transformer.recording import Record


def input_x_gradient(tokens: Tensor, gradient: Tensor) -> Tensor:
    """Compute Σ_c x_c ∂y/∂x_c (SkipPLUS, Equation 1) of tokens x (B, ..., D) and ∂y/∂x (B, V, ..., D) → (B, V, ...).

    >>> import torch
    >>> input_x_gradient(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[[3.0, 4.0]]]])).tolist()
    [[[11.0]]]
    """
    return (tokens[:, None] * gradient).sum(-1)


class TokenGradient(Layerwise):
    """Plain gradients of the tokens that enter a layer ("vanilla gradients", SkipPLUS, Section E.1 and Figure 8).

    Args:
        channels: `norm` for ‖∂y/∂x‖₂, `sum` for Σ_c ∂y/∂x_c. The sum is 0 up to rounding for every transformer whose
            normalisations subtract the mean over channels, such as ViT: adding a constant to a token changes nothing.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layer: int = 0,
        channels: Literal["norm", "sum"] = "norm",
    ) -> None:
        super().__init__(target, grid, output, layer)
        self.channels = channels
        self.linear = self.signed = channels == "sum"

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        of_tokens = gradients(record.inputs[start:])
        return [self.on_grid(each.norm(dim=-1) if self.channels == "norm" else each.sum(-1)) for each in of_tokens]


class InputXGradient(Layerwise):
    """Input × Gradient of the tokens that enter a layer, see `input_x_gradient` (SkipPLUS, Equation 1)."""

    linear = True

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        tokens = record.inputs[start:]
        return [self.on_grid(input_x_gradient(*pair)) for pair in zip(tokens, gradients(tokens), strict=True)]


class AttIxG(Layerwise):
    """Input × Gradient of each token, times the mean attention that it receives from all tokens (SkipPLUS, 3.4).

    Args:
        next_input: multiply the attention of layer l with the Input × Gradient of layer l + 1, as SkipPLUS's code does;
            the last layer then has no map. `False`: with the Input × Gradient of layer l, as AttCAT does.
    """

    reads = Reads(attention=True)
    linear = True

    def __init__(
        self, target: TargetModel, grid: PatchGrid, output: Output = "logit", layer: int = 0, next_input: bool = False
    ) -> None:
        super().__init__(target, grid, output, layer)
        self.next_input = next_input

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        tokens = record.inputs[start + self.next_input :]
        attention = record.attention[start : start + len(tokens)]
        return [
            self.on_grid(input_x_gradient(x, gradient) * weights.mean((1, 2))[:, None])
            for x, gradient, weights in zip(tokens, gradients(tokens), attention, strict=True)
        ]


class FullGrad(InputXGradient):
    """Input × Gradient of a layer's input plus bias × gradient of all later biases (Srinivas & Fleuret, 2019).

    Its PLUS and SkipPLUS are FullGrad+, which counts each bias once (SkipPLUS, Equations 5 and 6). Under the rules
    `FROZEN`, the scores of all tokens and the constant biases of the head sum to the class score.
    """

    reads = Reads(biases=True)

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        maps, bias_maps = self._maps(record, gradients, start)
        return [layer_map + add_maps(bias_maps[i:]) for i, layer_map in enumerate(maps)]

    def plus(self, record: Record, gradients: Gradients, start: int) -> Tensor:
        maps, bias_maps = self._maps(record, gradients, start)
        return add_maps(maps + bias_maps)

    def _maps(self, record: Record, gradients: Gradients, start: int) -> tuple[list[Tensor], list[Tensor]]:
        """Compute two maps (B, V, rows, columns) for each layer from `start` on: of its input, and of its biases."""
        tokens = record.inputs[start:]
        # After the pooling, and in relative positions, a bias is added to no tokens: it belongs to no patch
        of_tokens = tokens[0].shape[:-1]
        pairs = [[pair for pair in layer if pair[0].shape[:-1] == of_tokens] for layer in record.biases[start:]]
        remaining = iter(gradients([*tokens, *(output for layer in pairs for output, _ in layer)]))
        scores = [input_x_gradient(x, next(remaining)) for x in tokens]
        of_biases = [  # 0 for a layer without biases
            add_maps([0 * of_input, *(next(remaining) @ bias for _, bias in layer)])
            for of_input, layer in zip(scores, pairs, strict=True)
        ]
        return [self.on_grid(of_input) for of_input in scores], [self.on_grid(of_bias) for of_bias in of_biases]


class CAT(PLUS):
    """Class Activation Tokens: Input × Gradient of all layers (SkipPLUS, Section 3.4)."""

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, partial(InputXGradient, output=output))


class AttCAT(PLUS):
    """Attentive Class Activation Tokens: AttIxG of all layers (SkipPLUS, Section 3.4; Qiang et al., 2022)."""

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, partial(AttIxG, output=output))
