"""LIME (Ribeiro et al., 2016): a linear model of the probability, fitted to images with random patches hidden."""

from typing import Literal

import torch
from torch import Tensor

from explainers.errors import check_positive, checks_choices, needs
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.posthoc.masks import MaskMethod
from explainers.posthoc.soft_masks import patch_means
from explainers.runtime.modes import finest_dtype, keep_random_state, to_float64
from explainers.runtime.sampling import uniform


def fit_linear(keep: Tensor, scores: Tensor, weights: Tensor, alpha: float, lasso: bool = False) -> Tensor:
    """Fit the coefficients w of score ≈ b + Σ_z w_z [z is visible], which are LIME's explanation.

    Ridge minimises Σ_m π_m (error_m)² + α |w|², and Lasso Σ_m π_m (error_m)² / (2 Σ_m π_m) + α Σ_z |w_z|.

    Args:
        keep: visible patches of the samples, boolean (M, N).
        scores: probabilities of the class, (B, M).
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
    """Draw samples, boolean (count, N), in which patches are visible with probability 1/2; more begin with the same."""
    numbers = torch.arange(count * num_patches, device=device)
    return uniform(numbers, seed).view(count, -1) < 0.5


def sample_weights(normalised: Tensor, keep: Tensor, grid: PatchGrid, kernel_width: float) -> Tensor:
    """Compute the weights exp(−d² / (2 · kernel_width²)) of samples, where d is their cosine distance to the image.

    Of normalised images (B, C, H, W), and visible patches `keep`, boolean (M, N): in `finest_dtype`, (B, M).
    """
    energy = patch_means(normalised.square().sum(1), grid).flatten(1)  # (B, N)
    energy = energy.to(finest_dtype(energy.device))  # autocast would compute the product in bfloat16
    # The cosine of an image x and its masked copy is |masked| / |x|, because the copy's pixels are x's or 0
    cosine = (energy @ keep.mT.to(energy.dtype) / energy.sum(1, keepdim=True).clamp(min=1e-12)).sqrt()
    return torch.exp(-((1 - cosine) ** 2) / (2 * kernel_width**2))


class LIME(MaskMethod):
    """Coefficients of a linear fit to the class probability of samples, each patch visible with probability 1/2.

    A sample has the weight exp(−d² / (2 · kernel_width²)), where d is its cosine distance to the image (Ribeiro et al.,
    2016). The defaults are the ridge regression of the authors' library, and enough samples to determine its
    coefficients. captum, and TVE with it, fits a Lasso with α = 0.01 to 25 samples, fewer than there are patches. That
    Lasso sets coefficients below about α / 0.25 = 0.04 to 0, where 0.25 is the variance of [patch is visible].

    Args:
        samples: M, number of samples; all images get the same ones.
        regression: kind of the linear fit, see `fit_linear`.
        alpha: α, strength of the penalty; `None` for 1 with ridge and 0.01 with the Lasso.
        kernel_width: width of the kernel, in cosine distance.
        seed: seed of the samples.
    """

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
        super().__init__(target, grid, removal, chunk_size)
        self.lasso = regression == "lasso"
        self.alpha = alpha if alpha is not None else 0.01 if self.lasso else 1.0
        check_positive(samples=samples, kernel_width=kernel_width, alpha=self.alpha)
        self.samples = self.forward_passes = samples
        self.kernel_width = kernel_width
        self.seed = seed

    def patch_scores(self, normalised: Tensor, classes: Tensor) -> Tensor:
        keep = lime_samples(self.samples, self.grid.num_patches, self.seed, normalised.device)
        scores = self.score_masks(normalised, classes, keep.expand(len(normalised), -1, -1))
        weights = sample_weights(normalised, keep, self.grid, self.kernel_width)
        return fit_linear(keep, scores, weights, self.alpha, self.lasso)
