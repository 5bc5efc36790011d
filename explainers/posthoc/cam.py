"""Class activation maps on the tokens of each layer of a transformer: Σ_c w_c x_c with weights of gradients.

The layers of a CNN are its stages, and what they output takes the place of the tokens: layer −1 is the last feature
map, as in the papers.

Defaults are those of each paper. PLUS and SkipPLUS sum maps with both signs, so they leave out a method's ReLU.
Features x of CNNs follow a ReLU and are not negative; tokens have both signs, so formulas that divide by sums of tokens
can divide by almost 0. The formulas take features x (B, ..., D) and gradients ∂y/∂x (B, V, ..., D) → maps (B, V, ...).
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from explainers.masking import PatchGrid, map_shape
from explainers.models import TargetModel
from explainers.posthoc.gradients import input_x_gradient
from explainers.posthoc.layerwise import Layerwise
from explainers.posthoc.white_box import Gradients, Output, Reads
from explainers.transformer.blocks import num_prefix_tokens
from explainers.transformer.recording import Record

Tokens = Literal["norm1", "input"]
"""`norm1`: the patches behind the first normalisation of the layer, as pytorch-grad-cam recommends for ViT and Swin;
`input`: all tokens that enter the layer, whose maps PLUS and SkipPLUS add, whatever is chosen here."""


def cam(features: Tensor, gradient: Tensor) -> Tensor:
    """Compute Grad-CAM without its ReLU, Σ_c w_c x_c (Selvaraju et al., 2017, Equation 2).

    The weight w_c is the mean over positions of the gradient of channel c.
    """
    return input_x_gradient(features, gradient.mean(_positions(gradient), keepdim=True))


def x_grad_cam(features: Tensor, gradient: Tensor, absolute: bool = False) -> Tensor:
    """Compute XGrad-CAM, Σ_c w_c x_c with w_c = Σ x_c ∂y/∂x_c / Σ x_c, summed over positions (Fu et al., 2020, Eq. 8).

    XGrad-CAM+ takes the `absolute` |x_c| instead of x_c in the weights.
    """
    sizes = features[:, None].abs() if absolute else features[:, None]
    positions = _positions(gradient)
    weights = (gradient * sizes).sum(positions, keepdim=True) / (sizes.sum(positions, keepdim=True) + 1e-7)
    return input_x_gradient(features, weights)


def grad_cam_plus_plus(features: Tensor, gradient: Tensor) -> Tensor:
    """Compute Grad-CAM++ without its ReLU, Σ_c w_c x_c with w_c = Σ α_c (∂y/∂x_c)⁺ (Chattopadhyay et al., 2018).

    With g = ∂y/∂x_c, α_c = g² / (2 g² + g³ Σ |x_c|) = 1 / (2 + g Σ |x_c|); the sums are over positions. Features of the
    paper are not negative; of tokens, the sum of sizes |x_c| keeps the denominator from 0 as it does there. The paper's
    factor exp(y), which all positions and layers of an image share, is left out.
    """
    positions = _positions(gradient)
    alphas = 1 / (2 + gradient * features[:, None].abs().sum(positions, keepdim=True))
    return input_x_gradient(features, (alphas * gradient.clamp(min=0)).sum(positions, keepdim=True))


def element_wise_cam(features: Tensor, gradient: Tensor) -> Tensor:
    """Compute Σ_c (x_c ∂y/∂x_c)⁺, GradCAMElementWise of pytorch-grad-cam."""
    return (features[:, None] * gradient).clamp(min=0).sum(-1)


def layer_cam(features: Tensor, gradient: Tensor) -> Tensor:
    """Compute Σ_c (∂y/∂x_c)⁺ x_c (Jiang et al., 2021)."""
    return input_x_gradient(features, gradient.clamp(min=0))


def _positions(gradient: Tensor) -> tuple[int, ...]:
    """Return the dimensions of the positions of gradients (B, V, ..., D)."""
    return tuple(range(2, gradient.dim() - 1))


class GradCAM(Layerwise):
    """Grad-CAM (Selvaraju et al., 2017): (Σ_c w_c x_c)⁺ of the last layer, see `cam` for the weights w_c.

    Args:
        relu: set negative scores to 0. PLUS and SkipPLUS sum maps with both signs, whatever this says.
        tokens: which tokens of a transformer's layer have a map, see `Tokens`.
    """

    linear = True
    reads = Reads(stages=True)
    layer_options = "layer", "relu", "tokens"
    weighted: Callable[..., Tensor] = staticmethod(cam)

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layer: int = -1,
        relu: bool = True,
        tokens: Tokens = "norm1",
    ) -> None:
        super().__init__(target, grid, output, layer)
        self.relu = relu
        self.reads = Reads(stages=True, norms=tokens == "norm1" and not self.on_stages)
        self.linear = self.linear and not relu
        self.signed = self.signed and not relu

    def keep_signs(self) -> None:
        self.relu, self.reads = False, Reads(stages=True)
        self.linear, self.signed = type(self).linear, type(self).signed

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        if not self.reads.norms:
            return super().heatmaps(record, gradients)
        tokens = record.normalised[self.start]  # of the patches alone, without prefix tokens
        return self._map(self._patches(tokens, 1), self._patches(gradients([tokens])[0], 2))

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        tokens = record.inputs[start:]
        return [self._map(x, gradient) for x, gradient in zip(tokens, gradients(tokens), strict=True)]

    def _patches(self, tokens: Tensor, dim: int) -> Tensor:
        """Cut the dimension of tokens to those of patches, as rows and columns."""
        if tokens.dim() == dim + 3:  # Swin has them already
            return tokens
        prefix = num_prefix_tokens(self.target)
        patches = tokens.narrow(dim, prefix, tokens.shape[dim] - prefix)
        return patches.unflatten(dim, map_shape(patches.shape[dim], self.grid.shape))

    def _map(self, features: Tensor, gradient: Tensor) -> Tensor:
        scores = self.weighted(features, gradient)
        return self.on_grid(scores.clamp(min=0) if self.relu else scores)


class GradCAMPlusPlus(GradCAM):
    """Grad-CAM++ (Chattopadhyay et al., 2018), see `grad_cam_plus_plus`."""

    linear = False
    weighted = staticmethod(grad_cam_plus_plus)


class ElementWiseCAM(GradCAM):
    """GradCAMElementWise of pytorch-grad-cam, see `element_wise_cam`; no score is negative."""

    linear = False
    signed = False
    weighted = staticmethod(element_wise_cam)


class LayerCAM(GradCAM):
    """LayerCAM (Jiang et al., 2021), see `layer_cam`; maps of layers are not scaled to equal maxima (SkipPLUS, 3.4)."""

    linear = False
    weighted = staticmethod(layer_cam)


class ConservedCAM(GradCAM):
    """Base class of CAMs without a ReLU: their papers want the map to sum to the score, as far as it can."""

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layer: int = -1,
        relu: bool = False,
        tokens: Tokens = "norm1",
    ) -> None:
        super().__init__(target, grid, output, layer, relu, tokens)


class XGradCAM(ConservedCAM):
    """XGrad-CAM (Fu et al., 2020, Equation 8), see `x_grad_cam`."""

    weighted = staticmethod(x_grad_cam)


class XGradCAMPlus(ConservedCAM):
    """XGrad-CAM+: XGrad-CAM with |x_c| in its weights (SkipPLUS, Section E.1.1), see `x_grad_cam`."""

    weighted = staticmethod(partial(x_grad_cam, absolute=True))


class HiResCAM(ConservedCAM):
    """HiResCAM (Draelos & Carin, 2020): Input × Gradient of the last layer.

    With `tokens="input"`, the map of the last layer of a transformer is 0 up to rounding if the head reads the class
    token: patches act on it behind a LayerNorm alone, which ignores their length. Take `layer=-2` with it.
    """

    weighted = staticmethod(input_x_gradient)
