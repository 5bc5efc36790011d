"""What the methods of `pixel_gradients` share: weighted sums of the gradients of scores at pixels."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from explainers import Details
from explainers.errors import check_positive
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.gradients import check_gradients, gradient_at, no_gradient
from explainers.models.inputs import Functionals, checked_classes, functionals_at
from explainers.posthoc.soft_masks import patch_means
from explainers.runtime.progress import advance

Points = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]
"""See the argument `points` of `mean_gradients`."""

INCOMPLETE = 0.5
"""Largest error of sums of attributions that is no reason for a warning, relative to what they should add up to."""


class Explained(nn.Module):
    """Computes the scores to explain: the logit of a class, or a functional of the embedding, for each image.

    Args:
        target: the model to explain.
    """

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
        wanted: classes (B,) or functionals (B, D) to explain, see `Explained`.
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
            gradients = gradient_at(inputs, at_points, target, "its logits").unflatten(0, where.shape[:2])
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
    """Warn if attributions do not add up to the difference of the scores of the images and of blank images.

    Args:
        sums: sum of the attributions of each image, (B,).
        differences: score of each image minus that of the blank one, (B,).
        method: name of the method.
        advice: the likely cause, and what to do.
    """
    error = ((sums - differences).abs().sum() / differences.abs().sum().clamp(min=1e-12)).item()
    if error > INCOMPLETE:
        warnings.warn(
            f"{method}: expected attributions that add up to the score of the image minus that of a blank image, got"
            f" sums that are more than {100 * INCOMPLETE:.0f} % off: {advice}",
            stacklevel=2,
        )


class PixelExplainer(nn.Module):
    """Base class of methods that take gradients at pixels, also inside `no_grad` and `inference_mode`.

    Args:
        target: the model to explain.
        grid: the patches of an image.
        chunk_size: maximum number of images in memory, see `images_in_memory`.
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
        return self._explanation(images, checked_classes(classes, images, self.target.num_classes))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain the logits of classes (B,) of uint8 images (B, C, H, W) → (B, P, P)."""
        return self.details(images, classes).heatmaps

    def explain(self, images: Tensor, functionals: Functionals) -> Tensor:
        """Explain linear functionals v · G(x) of the embedding, see `FunctionalExplainer`."""
        self.grid.check(images)
        embeddings = torch.empty(0)
        if not isinstance(functionals, Tensor):
            with torch.no_grad():
                embeddings = self.target.embed(self.target.normalise(images))
        found = functionals_at(functionals, images, self.target.embed_dim)(embeddings)
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
        """Sum scores of pixels (B, H, W) over each patch → (B, P, P)."""
        return patch_means(pixels, self.grid) * self.grid.patch_size**2
