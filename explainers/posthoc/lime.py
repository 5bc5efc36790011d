"""LIME (Ribeiro et al., 2016): a linear model of the probability, fitted to images with random patches hidden."""

from typing import Literal

import torch
from torch import Tensor, nn

from explainers.errors import check_positive, checks_choices, needs
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.models.inputs import checked_classes
from explainers.models.removal import check_removal, masked_probabilities
from explainers.posthoc.soft_masks import patch_means
from explainers.runtime.modes import finest_dtype, keep_random_state, to_float64
from explainers.sampling import uniform


def fit_linear(keep: Tensor, scores: Tensor, weights: Tensor, alpha: float, lasso: bool = False) -> Tensor:
    """Fit the coefficients w of score ≈ b + Σ_z w_z [z is visible], which are LIME's explanation.

    Ridge minimises Σ_m π_m (error_m)² + α |w|², and Lasso Σ_m π_m (error_m)² / (2 Σ_m π_m) + α Σ_z |w_z|.

    Args:
        keep: visible patches, boolean (M, N), the same for all images.
        scores: probabilities of the class, one for each sample, (B, M).
        weights: π, weights of the samples, (B, M).
        alpha: α, strength of the penalty.
        lasso: fit the Lasso instead of ridge regression.

    Returns:
        w, (B, N).
    """
    if lasso:
        needs("sklearn", "methods", "LIME with regression=lasso")
        with keep_random_state():  # which the import moves
            from sklearn.linear_model import Lasso  # here, because ridge does without it

        fits = [
            Lasso(alpha).fit(keep.cpu().numpy(), score, sample_weight=weight).coef_
            for score, weight in zip(scores.cpu().double().numpy(), weights.cpu().double().numpy(), strict=True)
        ]
        return torch.stack([torch.as_tensor(fit) for fit in fits]).to(scores)
    visible, wanted, weights = to_float64(keep), to_float64(scores)[..., None], to_float64(weights)[..., None]
    share = weights / weights.sum(1, keepdim=True)
    members = visible - (share * visible).sum(1, keepdim=True)  # centred: b is not penalised
    gain = (wanted - (share * wanted).sum(1, keepdim=True)) * weights
    system = members.mT @ (members * weights)
    penalty = alpha * torch.eye(keep.shape[-1], dtype=torch.double, device=visible.device)
    return torch.linalg.solve(system + penalty, members.mT @ gain)[..., 0].to(scores)


def lime_samples(count: int, num_patches: int, seed: int, device: torch.device | None = None) -> Tensor:
    """Draw samples in which each patch is visible with probability 1/2, boolean (count, N); more begin with the same.

    >>> torch.equal(lime_samples(3, 9, seed=0), lime_samples(5, 9, seed=0)[:3])
    True
    """
    numbers = torch.arange(count * num_patches, device=device)
    return uniform(numbers, seed).view(count, -1) < 0.5


def sample_weights(normalised: Tensor, keep: Tensor, grid: PatchGrid, kernel_width: float) -> Tensor:
    """Compute the weight exp(−d² / (2 · kernel_width²)) of every sample, where d is its cosine distance to the image.

    Args:
        normalised: images, (B, C, H, W).
        keep: visible patches, boolean (M, N), the same for all images.
        grid: the patches.
        kernel_width: width of the kernel, in cosine distance.

    Returns:
        In `finest_dtype`, (B, M).
    """
    # (B, N); in float64, because autocast would compute the product in bfloat16
    energy = patch_means(normalised.square().sum(1), grid).flatten(1)
    energy = energy.to(finest_dtype(energy.device))
    # The cosine of an image x and its masked copy is |masked| / |x|, because the copy's pixels are x's or 0
    cosine = (energy @ keep.mT.to(energy.dtype) / energy.sum(1, keepdim=True).clamp(min=1e-12)).sqrt()
    return torch.exp(-((1 - cosine) ** 2) / (2 * kernel_width**2))


class LIME(nn.Module):
    """Coefficients of a linear fit to the class probability of samples, each patch visible with probability 1/2.

    A sample has the weight exp(−d² / (2 · kernel_width²)), where d is its cosine distance to the image (Ribeiro et al.,
    2016). The defaults are the ridge regression of the authors' library, and enough samples to determine its
    coefficients. captum, and TVE with it, fits a Lasso with α = 0.01 to 25 samples, fewer than there are patches. That
    Lasso sets coefficients below about α / 0.25 = 0.04 to 0, where 0.25 is the variance of [patch is visible].

    Args:
        target: the model to explain.
        grid: the patches that are hidden.
        samples: M, number of samples; all images get the same ones.
        regression: kind of the linear fit, see `fit_linear`.
        alpha: α, strength of the penalty; `None` for 1 with ridge and 0.01 with the Lasso.
        kernel_width: width of the kernel, in cosine distance.
        removal: what replaces hidden patches, see `masking.Removal`.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the samples.
    """

    signed = True

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        samples: int = 1000,
        regression: Literal["ridge", "lasso"] = "ridge",
        alpha: float | None = None,
        kernel_width: float = 1.0,
        removal: Removal = "zero",
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_removal(target, removal)
        check_positive(samples=samples, kernel_width=kernel_width, chunk_size=chunk_size)
        if alpha is not None:
            check_positive(alpha=alpha)
        target.check_grid(grid)
        self.target = target.in_eval_mode()
        self.grid = grid
        self.removal = removal
        self.samples = self.forward_passes = samples
        self.lasso = regression == "lasso"
        self.kernel_width = kernel_width
        self.chunk_size = chunk_size
        self.seed = seed
        self.alpha = alpha if alpha is not None else 0.01 if self.lasso else 1.0

    @torch.no_grad()
    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        self.grid.check(images)
        classes = checked_classes(classes, images, self.target.num_classes)
        keep = lime_samples(self.samples, self.grid.num_patches, self.seed, images.device)
        normalised = self.target.normalise(images)
        every = keep.expand(len(images), -1, -1)
        scores = masked_probabilities(self.target, normalised, classes, every, self.grid, self.removal, self.chunk_size)
        weights = sample_weights(normalised, keep, self.grid, self.kernel_width)
        return fit_linear(keep, scores, weights, self.alpha, self.lasso).unflatten(-1, (self.grid.side, -1))
