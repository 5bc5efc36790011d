"""Class activation maps on the tokens of each layer of a transformer: Σ_c w_c x_c with weights of gradients.

The layers of a CNN are its stages, and what they output takes the place of the tokens: layer −1 is the last feature
map, as in the papers.

They are without the ReLU of their papers by default, because SkipPLUS sums maps with both signs. Features x of CNNs
follow a ReLU and are not negative. Tokens have both signs, so formulas that divide by features can divide by almost 0.
"""

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Literal

from torch import Tensor

from explainers.errors import checks_choices
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.gradients import input_x_gradient
from explainers.posthoc.layerwise import Layerwise
from explainers.posthoc.white_box import Gradients, Output
from explainers.transformer.blocks import is_transformer, num_prefix_tokens
from explainers.transformer.recording import Record

Tokens = Literal["auto", "norm1", "input"]
"""`norm1`: the patches behind the first normalisation of the layer, as pytorch-grad-cam recommends for ViT and Swin;
`input`: all tokens that enter the layer, whose maps SkipPLUS adds; `auto`: `input` in PLUS and SkipPLUS, and otherwise
`norm1`."""


def cam(features: Tensor, gradient: Tensor) -> Tensor:
    """Compute Grad-CAM without its ReLU, Σ_c w_c x_c (Selvaraju et al., 2017, Equation 2).

    The weight w_c is the mean over positions of the gradient of channel c.

    Args:
        features: x, (B, ..., D).
        gradient: ∂y/∂x, (B, V, ..., D).

    Returns:
        (B, V, ...).
    """
    return input_x_gradient(features, gradient.mean(_positions(gradient), keepdim=True))


def x_grad_cam(features: Tensor, gradient: Tensor, signed: bool = False) -> Tensor:
    """Compute XGrad-CAM, Σ_c w_c x_c with w_c = Σ |x_c| ∂y/∂x_c / Σ |x_c|, summed over positions.

    Args:
        features: x, (B, ..., D).
        gradient: ∂y/∂x, (B, V, ..., D).
        signed: take x_c instead of |x_c| in the weights (Fu et al., 2020, Equation 8).

    Returns:
        (B, V, ...).
    """
    sizes = features[:, None] if signed else features[:, None].abs()
    positions = _positions(gradient)
    weights = (gradient * sizes).sum(positions, keepdim=True) / (sizes.sum(positions, keepdim=True) + 1e-7)
    return input_x_gradient(features, weights)


def grad_cam_plus_plus(features: Tensor, gradient: Tensor, signed: bool = False) -> Tensor:
    """Compute Grad-CAM++, Σ_c w_c x_c with w_c = Σ α_c (∂y/∂x_c)⁺ (Chattopadhyay et al., 2018).

    With g = ∂y/∂x_c, α_c = g² / (2 g² + g³ Σ |x_c|) = 1 / (2 + g Σ |x_c|); the sums are over positions. The paper's
    factor exp(y), which all positions and layers of an image share, is left out.

    Args:
        features: x, (B, ..., D).
        gradient: ∂y/∂x, (B, V, ..., D).
        signed: take x_c instead of |x_c| in α_c, as the paper does.

    Returns:
        (B, V, ...).
    """
    sizes = features[:, None] if signed else features[:, None].abs()
    positions = _positions(gradient)
    alphas = 1 / (2 + gradient * sizes.sum(positions, keepdim=True))
    return input_x_gradient(features, (alphas * gradient.clamp(min=0)).sum(positions, keepdim=True))


def element_wise_cam(features: Tensor, gradient: Tensor) -> Tensor:
    """Compute Σ_c (x_c ∂y/∂x_c)⁺, GradCAMElementWise of pytorch-grad-cam: features (B, ..., D) → (B, V, ...)."""
    return (features[:, None] * gradient).clamp(min=0).sum(-1)


def layer_cam(features: Tensor, gradient: Tensor) -> Tensor:
    """Compute Σ_c (∂y/∂x_c)⁺ x_c (Jiang et al., 2021): features (B, ..., D) → (B, V, ...)."""
    return input_x_gradient(features, gradient.clamp(min=0))


def _positions(gradient: Tensor) -> tuple[int, ...]:
    """Return the dimensions of the positions of gradients (B, V, ..., D)."""
    return tuple(range(2, gradient.dim() - 1))


class GradCAM(Layerwise):
    """Grad-CAM on the tokens of a layer: by default the last layer, and without the ReLU of Grad-CAM.

    Args:
        target: the model to explain, a timm transformer, or a model with square feature maps.
        grid: the patches that are explained.
        output: score of the class that is explained: `logit`, `probability` or `log_odds`.
        layer: index of the layer whose map is the heatmap; negative from the last.
        relu: set negative scores to 0, as Grad-CAM does; SkipPLUS sums maps with both signs.
        tokens: which tokens of a transformer's layer have a map, see `Tokens`.
    """

    linear = True
    takes_stages = True
    weighted: Callable[..., Tensor] = staticmethod(cam)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layer: int = -1,
        relu: bool = False,
        tokens: Tokens = "auto",
    ) -> None:
        super().__init__(target, grid, output, layer)
        self.relu = relu
        self.tokens = tokens
        self.norms = not self.on_stages and tokens != "input"
        self.linear = self.linear and not relu
        self.signed = self.signed and not relu

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        if not self.norms:
            return super().heatmaps(record, gradients)
        return self._maps_of_patches(record.normalised[self.start : self.start + 1], gradients)[0]

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        if self.tokens == "norm1" and self.norms:
            return self._maps_of_patches(record.normalised[start:], gradients)
        tokens = record.inputs[start:]
        return [self._map(x, gradient) for x, gradient in zip(tokens, gradients(tokens), strict=True)]

    def _maps_of_patches(self, tokens: list[Tensor], gradients: Gradients) -> list[Tensor]:
        """Compute the maps (B, V, P, P) of the patches alone, without prefix tokens."""
        pairs = zip(tokens, gradients(tokens), strict=True)
        return [self._map(self._patches(x, 1), self._patches(gradient, 2)) for x, gradient in pairs]

    def _patches(self, tokens: Tensor, dim: int) -> Tensor:
        """Cut the dimension of tokens to those of patches, as rows and columns."""
        if tokens.dim() == dim + 3:  # Swin has them already
            return tokens
        prefix = num_prefix_tokens(self.target)
        patches = tokens.narrow(dim, prefix, tokens.shape[dim] - prefix)
        return patches.unflatten(dim, (isqrt(patches.shape[dim]), -1))

    def _map(self, features: Tensor, gradient: Tensor) -> Tensor:
        scores = self.weighted(features, gradient)
        return self.on_grid(scores.clamp(min=0) if self.relu else scores)


class SizedCAM(GradCAM):
    """Base class of CAMs whose weights depend on the features: on their sizes |x_c|, unless `signed`.

    Args:
        target: the model to explain, a timm transformer.
        grid: the patches that are explained.
        output: score of the class that is explained: `logit`, `probability` or `log_odds`.
        layer: index of the layer whose map is the heatmap; negative from the last.
        relu: set negative scores to 0.
        signed: weights of x_c, as the method's own paper has them; the attribute `signed` is that of `Explainer`.
        tokens: see `GradCAM`.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layer: int = -1,
        relu: bool = False,
        signed: bool = False,
        tokens: Tokens = "auto",
    ) -> None:
        super().__init__(target, grid, output, layer, relu, tokens)
        self.weighted = partial(type(self).weighted, signed=signed)


class XGradCAM(SizedCAM):
    """XGrad-CAM on the tokens of a layer, see `x_grad_cam`.

    SkipPLUS and LibraGrad call the default XGradCAM+, and the one with `signed` XGradCAM (SkipPLUS, Section E.1.1).
    """

    weighted = staticmethod(x_grad_cam)


class GradCAMPlusPlus(SizedCAM):
    """Grad-CAM++ on the tokens of a layer, see `grad_cam_plus_plus`."""

    linear = False
    weighted = staticmethod(grad_cam_plus_plus)


class HiResCAM(GradCAM):
    """HiResCAM (Draelos & Carin, 2020): Input × Gradient of the tokens of a late layer. Its PLUS is `CAT`.

    The map of all tokens that enter the last layer is 0 up to rounding if the head reads the class token: patches act
    on it behind a LayerNorm alone, which ignores their length. With `tokens="input"`, the default is therefore the
    layer before.

    Args:
        target: the model to explain, a timm transformer.
        grid: the patches that are explained.
        output: score of the class that is explained: `logit`, `probability` or `log_odds`.
        layer: index of the layer whose map is the heatmap; negative from the last; `None` for the default.
        relu: set negative scores to 0.
        tokens: see `GradCAM`.
    """

    weighted = staticmethod(input_x_gradient)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layer: int | None = None,
        relu: bool = False,
        tokens: Tokens = "auto",
    ) -> None:
        default = -2 if tokens == "input" and is_transformer(target) else -1
        super().__init__(target, grid, output, default if layer is None else layer, relu, tokens)


class ElementWiseCAM(GradCAM):
    """GradCAMElementWise on the tokens of a layer, see `element_wise_cam`."""

    linear = False
    signed = False
    weighted = staticmethod(element_wise_cam)


class LayerCAM(GradCAM):
    """LayerCAM on the tokens of a layer, see `layer_cam`.

    LayerCAM also scales the map of each layer to equal maxima. SkipPLUS leaves that out (Section 3.4), as does PLUS
    here.
    """

    linear = False
    weighted = staticmethod(layer_cam)
