"""Methods of gradients with respect to pixels: Saliency, SmoothGrad, integrated gradients, GradientSHAP, DeepLift.

They explain the logit of a class, or with `explain` a linear functional v · G(x) of the embedding. captum has these
methods too, but draws random numbers from the global generators, so the heatmap of an image would depend on its batch
and on earlier calls. Only DeepLift is captum's.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from explainers import Details
from explainers.errors import UnsupportedModel, check_positive, check_range, needs
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.gradients import check_gradients, compute_gradient, no_gradient
from explainers.models.inputs import Functionals, resolve_functionals, validate_classes
from explainers.posthoc.soft_masks import gaussian_noise, patch_means
from explainers.runtime.progress import advance
from explainers.runtime.sampling import uniform

Points = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]
"""See the argument `points` of `mean_gradients`."""


class Explained(nn.Module):
    """Computes the explained number of each image: a logit of `target`, or a functional of its embedding."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self.target = target

    def forward(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        """Score normalised images (B, C, H, W) by `wanted`, classes (B,) or functionals (B, D) → (B,)."""
        embeddings = self.target.embed(normalised)
        if wanted.dim() == 2:
            return (embeddings * wanted).sum(1)
        return self.target.classify(embeddings).take_along_dim(wanted[:, None], 1)[:, 0]


def mean_gradients(
    target: TargetModel, normalised: Tensor, wanted: Tensor, points: Points, weights: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute Σ_i w_i a_i ⊙ ∇f(x_i): a weighted sum of gradients at several points x_i for each image.

    Args:
        target: the model to explain.
        normalised: images, (B, C, H, W).
        wanted: classes (B,) or functionals (B, D) to explain.
        points: images (b, C, H, W) and numbers i of points (n,) → points x_i (b, n, C, H, W), and factors a_i that can
            be broadcast to them.
        weights: w, one for each point, (points,).
        chunk_size: maximum number of points in memory, see `images_in_memory`.

    Returns:
        The sum (B, C, H, W), and the scores f(x_i), (B, points).
    """
    score, sums, scores = Explained(target), [], []
    chunk_size = images_in_memory(chunk_size, normalised)
    for image in torch.arange(len(normalised), device=normalised.device).split(chunk_size):
        part = normalised[image]
        total, of_points = torch.zeros_like(part), []
        for numbers in torch.arange(len(weights), device=part.device).split(max(1, chunk_size // len(part))):
            where, factors = points(part, numbers)
            inputs = where.flatten(0, 1).detach().requires_grad_()
            at_points = score(inputs, wanted[image].repeat_interleave(len(numbers), 0))
            gradients = compute_gradient(inputs, at_points, target, "its logits").unflatten(0, where.shape[:2])
            total += (gradients * factors * weights[numbers, None, None, None]).sum(1)
            advance(len(inputs))
            of_points.append(at_points.detach().unflatten(0, where.shape[:2]))
        sums.append(total)
        scores.append(torch.cat(of_points, 1))
    return torch.cat(sums), torch.cat(scores)


def images_in_memory(chunk_size: int, images: Tensor) -> int:
    """Number of images (B, C, H, W) in memory at once: `chunk_size` of 224 × 224 pixels, and fewer larger ones.

    >>> images_in_memory(64, torch.empty(1, 3, 448, 448)), images_in_memory(64, torch.empty(1, 3, 32, 32))
    (16, 64)
    """
    return max(1, chunk_size * 224**2 // max(224**2, images.shape[-2] * images.shape[-1]))


def warn_if_incomplete(sums: Tensor, differences: Tensor, method: str, advice: str) -> None:
    """Warn if attributions do not sum to the differences of the scores of images and of blank ones, both (B,)."""
    error = ((sums - differences).abs().sum() / differences.abs().sum().clamp(min=1e-12)).item()
    if error > 0.5:
        warnings.warn(
            f"{method}: expected attributions that add up to the score of the image minus the score of a blank image,"
            f" got sums that are more than 50 % off: {advice}",
            stacklevel=2,
        )


class PixelExplainer(nn.Module):
    """Base class of methods that take gradients at pixels, also inside `no_grad` and `inference_mode`.

    Args:
        target: the model to explain.
        grid: the patches of an image.
        chunk_size: maximum number of images, or of points x_i, in memory, see `images_in_memory`.
    """

    signed: bool = True

    def __init__(self, target: TargetModel, grid: PatchGrid, chunk_size: int) -> None:
        super().__init__()
        check_positive(chunk_size=chunk_size)
        target.check_grid(grid)
        if not getattr(target.backbone, "differentiable", True):
            raise no_gradient(target, "its logits")
        self.target = target.in_eval_mode()
        self.grid = grid
        self.chunk_size = chunk_size

    def details(self, images: Tensor, classes: Tensor) -> Details:
        """Explain the logits of classes (B,) of uint8 images (B, C, H, W), with saliency maps of pixels."""
        self.grid.check(images)
        return self._explanation(images, validate_classes(classes, images, self.target.num_classes))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return self.details(images, classes).heatmaps

    def explain(self, images: Tensor, functionals: Functionals) -> Tensor:
        """Explain linear functionals v · G(x) of the embedding, see `FunctionalExplainer`."""
        self.grid.check(images)
        embeddings = torch.empty(0)
        if not isinstance(functionals, Tensor):
            with torch.no_grad():
                embeddings = self.target.embed(self.target.normalise(images))
        found = resolve_functionals(functionals, images, self.target.embed_dim)(embeddings)
        heatmaps = torch.stack([self._explanation(images, v).heatmaps for v in found.unbind(1)], 1)
        return heatmaps[:, 0] if isinstance(functionals, Tensor) and functionals.dim() == 2 else heatmaps

    def _explanation(self, images: Tensor, wanted: Tensor) -> Details:
        with torch.inference_mode(False), torch.enable_grad(), check_gradients(self.target, "pixels"):
            # Autograd refuses tensors that were made in inference mode; their copies are ordinary
            normalised, wanted = self.target.normalise(images.clone()), wanted.clone()
            pixels = self.pixels(normalised, wanted).detach()
        return Details(self.over_patches(pixels), pixels)

    def pixels(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        """Explain classes (B,) or functionals (B, D) of normalised images (B, C, H, W) → (B, H, W)."""
        raise NotImplementedError

    def over_patches(self, pixels: Tensor) -> Tensor:
        """Sum scores of pixels (B, H, W) over each patch → (B, rows, columns)."""
        return patch_means(pixels, self.grid) * self.grid.patch_size**2


class SmoothGrad(PixelExplainer):
    """|mean gradient under noise| (Smilkov et al., 2017): its maximum over channels, averaged over each patch.

    Every image gets the same noise, scaled to its own range of values.

    Args:
        samples: number of noisy copies of an image.
        noise: standard deviation of the noise, as a fraction of the image's range of values.
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
        self.samples = self.forward_passes = samples
        self.noise = noise
        self.seed = seed

    def points(self, part: Tensor, numbers: Tensor) -> tuple[Tensor, float]:
        flat = part.flatten(1)
        deviation = self.noise * (flat.amax(1) - flat.amin(1))[:, None, None, None, None]
        return part[:, None] + deviation * gaussian_noise(numbers, part.shape[1:], self.seed), 1.0

    def pixels(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        weights = torch.full((self.samples,), 1 / self.samples, device=normalised.device, dtype=torch.float32)
        gradients, _ = mean_gradients(self.target, normalised, wanted, self.points, weights, self.chunk_size)
        return gradients.abs().amax(1)

    def over_patches(self, pixels: Tensor) -> Tensor:
        return patch_means(pixels, self.grid)


class Saliency(SmoothGrad):
    """|gradient of the logit| (Simonyan et al., 2014): its maximum over channels, averaged over each patch."""

    def __init__(self, target: TargetModel, grid: PatchGrid, chunk_size: int = 64) -> None:
        super().__init__(target, grid, samples=1, noise=0.0, chunk_size=chunk_size)


class IntegratedGradients(PixelExplainer):
    """(x − x') ⊙ ∫ ∇f(x' + α (x − x')) dα, summed over each patch (Sundararajan et al., 2017, Equation 1).

    The reference x' is the mean pixel, 0. Gauss-Legendre quadrature approximates the integral, as in captum.

    Args:
        steps: number of points of the quadrature.
        multiply_by_inputs: multiply by x − x'; TVE's Appendix F does not.
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
        self.steps = self.forward_passes = steps
        self.multiply_by_inputs = multiply_by_inputs

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
    """Mean of x ⊙ ∇f(r x) over random r in [0, 1], summed over each patch (Lundberg & Lee, 2017).

    The reference is the mean pixel, 0. Every image gets the same r. captum, and TVE with it, uses 5 samples.

    Args:
        samples: number of random points.
        multiply_by_inputs: multiply by x; TVE's Appendix F does not.
        seed: seed of r.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        samples: int = 50,
        multiply_by_inputs: bool = True,
        chunk_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(target, grid, chunk_size)
        check_positive(samples=samples)
        self.samples = self.forward_passes = samples
        self.multiply_by_inputs = multiply_by_inputs
        self.seed = seed

    def points(self, part: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor | float]:
        coefficients = uniform(numbers, self.seed).to(part)[:, None, None, None]
        return coefficients * part[:, None], part[:, None] if self.multiply_by_inputs else 1.0

    def pixels(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        weights = torch.full((self.samples,), 1 / self.samples, device=normalised.device, dtype=torch.float32)
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
