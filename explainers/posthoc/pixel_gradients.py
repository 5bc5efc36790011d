"""Explainers by gradients with respect to pixels: Saliency, SmoothGrad, integrated gradients, GradientSHAP, DeepLift.

They explain the logit of a class, or with `explain` a linear functional v · G(x) of the embedding. captum has these
methods too, but draws random numbers from the global generators, so the heatmap of an image would depend on its batch
and on earlier calls. Only DeepLift is captum's.
"""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from explainers.errors import UnsupportedModel, check_positive, check_range, needs
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.pixel_explainer import (
    Explained,
    PixelExplainer,
    images_in_memory,
    mean_gradients,
    warn_if_incomplete,
)
from explainers.posthoc.soft_masks import gaussian_noise, patch_means
from explainers.sampling import uniform


class SmoothGrad(PixelExplainer):
    """|mean gradient under noise| (Smilkov et al., 2017): its maximum over channels, averaged over each patch.

    Every image gets the same noise, scaled to its own range of values.

    Args:
        samples: number of noisy copies of an image.
        noise: standard deviation of the noise, as a fraction of the image's range of values.
        chunk_size: maximum number of noisy images in memory, see `images_in_memory`.
        seed: seed of the noise.
    """

    signed = False

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        samples: int = 50,
        noise: float = 0.15,
        chunk_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(target, grid, chunk_size)
        check_positive(samples=samples)
        check_range(0, noise=noise)
        self.samples = samples
        self.noise = noise
        self.seed = seed
        self.forward_passes = samples

    def points(self, part: Tensor, numbers: Tensor) -> tuple[Tensor, float]:
        """Draw the noisy images of these numbers, see `mean_gradients`."""
        if self.noise == 0:
            return part[:, None].expand(-1, len(numbers), -1, -1, -1), 1.0
        flat = part.flatten(1)
        deviation = self.noise * (flat.amax(1) - flat.amin(1))[:, None, None, None, None]
        return part[:, None] + deviation * gaussian_noise(numbers, part.shape[1:], self.seed), 1.0

    def pixels(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        weights = torch.full((self.samples,), 1 / self.samples, device=normalised.device)
        gradients, _ = mean_gradients(self.target, normalised, wanted, self.points, weights, self.chunk_size)
        return gradients.abs().amax(1)

    def over_patches(self, pixels: Tensor) -> Tensor:
        return patch_means(pixels, self.grid)


class Saliency(SmoothGrad):
    """|gradient of the logit| (Simonyan et al., 2014): its maximum over channels, averaged over each patch.

    Args:
        chunk_size: maximum number of images in memory, see `images_in_memory`.
    """

    def __init__(self, target: TargetModel, grid: PatchGrid, chunk_size: int = 64) -> None:
        super().__init__(target, grid, samples=1, noise=0.0, chunk_size=chunk_size)


class IntegratedGradients(PixelExplainer):
    """(x − x') ⊙ ∫ ∇f(x' + α (x − x')) dα, summed over each patch (Sundararajan et al., 2017, Equation 1).

    The reference x' is the mean pixel, 0. Gauss-Legendre quadrature approximates the integral, as in captum.

    Args:
        steps: number of points of the quadrature.
        multiply_by_inputs: multiply by x − x'; TVE's Appendix F does not.
        chunk_size: maximum number of points in memory, see `images_in_memory`.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        steps: int = 50,
        multiply_by_inputs: bool = True,
        chunk_size: int = 64,
    ) -> None:
        super().__init__(target, grid, chunk_size)
        check_positive(steps=steps)
        self.steps = steps
        self.multiply_by_inputs = multiply_by_inputs
        self.forward_passes = steps

    def pixels(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        nodes, halves = (torch.as_tensor(x).to(normalised) for x in np.polynomial.legendre.leggauss(self.steps))

        def points(part: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor | float]:
            at = (1 + nodes[numbers, None, None, None]) / 2
            return at * part[:, None], part[:, None] if self.multiply_by_inputs else 1.0

        means, scores = mean_gradients(self.target, normalised, wanted, points, halves / 2, self.chunk_size)
        products = means if self.multiply_by_inputs else means * normalised
        ends = scores[:, -1] - scores[:, 0]  # the outermost points are close to the image and to the reference
        advice = f"steps={self.steps} is too small: set steps={4 * self.steps}, or take a method of masks, such as RISE"
        warn_if_incomplete(products.flatten(1).sum(1), ends, "IntegratedGradients", advice)
        return means.sum(1)


class GradientSHAP(PixelExplainer):
    """Mean of x ⊙ ∇f(r x) over random r in [0, 1] and noise on x, summed over each patch (Lundberg & Lee, 2017).

    The reference is the mean pixel, 0. Every image gets the same r and the same noise. captum, and TVE with it, uses 5
    samples without noise.

    Args:
        samples: number of random points.
        stdevs: standard deviation of the noise, in units of normalised pixels.
        multiply_by_inputs: multiply by the noisy x; TVE's Appendix F does not.
        chunk_size: maximum number of points in memory, see `images_in_memory`.
        seed: seed of r and of the noise.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        samples: int = 50,
        stdevs: float = 0.0,
        multiply_by_inputs: bool = True,
        chunk_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(target, grid, chunk_size)
        check_positive(samples=samples)
        check_range(0, stdevs=stdevs)
        self.samples = samples
        self.stdevs = stdevs
        self.multiply_by_inputs = multiply_by_inputs
        self.seed = seed
        self.forward_passes = samples

    def points(self, part: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor | float]:
        """Draw the points of these numbers, see `mean_gradients`."""
        noisy = part[:, None]
        if self.stdevs:
            noisy = noisy + self.stdevs * gaussian_noise(numbers, part.shape[1:], self.seed)
        coefficients = uniform(numbers, self.seed).to(part)[:, None, None, None]
        return coefficients * noisy, noisy if self.multiply_by_inputs else 1.0

    def pixels(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        weights = torch.full((self.samples,), 1 / self.samples, device=normalised.device)
        return mean_gradients(self.target, normalised, wanted, self.points, weights, self.chunk_size)[0].sum(1)


def rescale_rule(score: nn.Module, multiply_by_inputs: bool) -> Any:
    """captum's DeepLift without its rule for softmax modules (Swin has them), which mixes the images of a batch."""
    import captum.attr  # here, because all others do without captum

    class RescaleRule(captum.attr.DeepLift):
        def _is_non_linear(self, module: nn.Module) -> bool:
            return not isinstance(module, nn.Softmax) and super()._is_non_linear(module)

    return RescaleRule(score, multiply_by_inputs)


class DeepLift(PixelExplainer):
    """captum's rescale rule of DeepLift, summed over each patch (Shrikumar et al., 2017).

    The reference is the mean pixel, 0. captum has rules for the modules ReLU, ELU, sigmoid, tanh, softplus and
    max-pooling (inexact where windows overlap), but none for GELU, LayerNorm, attention, or functions such as F.relu.
    On transformers the result is therefore the input times the gradient, or the gradient alone without
    `multiply_by_inputs`; a warning says so where the attributions do not add up to the difference of the logits.

    Args:
        multiply_by_inputs: multiply by x; TVE's Appendix F does not.
        chunk_size: maximum number of images in memory; the reference of each image counts as an image.
    """

    forward_passes = 2
    advice = (
        "DeepLift has no rule for functions such as F.relu, nor for GELU, ReLU6, LayerNorm and attention, and takes"
        " their gradient at the image: take IntegratedGradients"
    )

    def __init__(
        self, target: TargetModel, grid: PatchGrid, multiply_by_inputs: bool = True, chunk_size: int = 64
    ) -> None:
        super().__init__(target, grid, chunk_size)
        needs("captum", "methods", "DeepLift")
        if getattr(target.backbone, "repeats_layers", False):
            raise UnsupportedModel(
                "a model whose activations are modules that are called once each",
                f"{target.name}, whose are not",
                "IntegratedGradients, or a model with a module for each activation",
            )
        self.multiply_by_inputs = multiply_by_inputs

    def pixels(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        score, scores = Explained(self.target), []
        score.register_forward_hook(lambda *call: scores.append(call[-1].detach()))  # of images, then of references
        method = rescale_rule(score, self.multiply_by_inputs)
        half = max(1, images_in_memory(self.chunk_size, normalised) // 2)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\s*(Setting forward, backward hooks|Input Tensor 0 did not already)")
            parts = [
                method.attribute(images, additional_forward_args=(functionals,))
                for images, functionals in zip(normalised.split(half), wanted.split(half), strict=True)
            ]
        attributions = torch.cat(parts)
        products = attributions if self.multiply_by_inputs else attributions * normalised
        differences = torch.cat([torch.sub(*part.chunk(2)) for part in scores])
        warn_if_incomplete(products.flatten(1).sum(1), differences, "DeepLift", self.advice)
        return attributions.sum(1)
