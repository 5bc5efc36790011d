"""ViT-CX (Xie et al., IJCAI 2023): masks from clustered feature maps, and their causal impact."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from explainers.errors import check_positive, check_range, checks_choices, needs
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.masks import RandomMasks, SoftMaskMethod
from explainers.posthoc.soft_masks import (
    Masks,
    cosine_distances,
    gaussian_noise,
    mean_similarity,
    score_soft_masks,
    unit_range,
    upsample_masks,
    weighted_sums,
)
from explainers.runtime.modes import keep_random_state
from explainers.transformer.blocks import Features, attention_channels, attention_features, attention_module


def cluster_masks(masks: Tensor, distances: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Merge similar masks: agglomerative clustering with complete linkage (Section 3.2).

    Args:
        masks: one for each channel, (channels, h, w).
        distances: their cosine distances, (channels, channels), see `cosine_distances`.
        delta: δ, cosine distance at and above which clusters are not merged; 0 merges nothing.

    Returns:
        The mean of the masks of each cluster (M, h, w), and the index of its first mask (M,), ascending.
    """
    if len(masks) < 2:
        return masks, torch.arange(len(masks), device=masks.device)
    with keep_random_state():  # which the import moves
        from sklearn.cluster import AgglomerativeClustering  # here, because most methods do without it

    clustering = AgglomerativeClustering(None, metric="precomputed", linkage="complete", distance_threshold=delta)
    labels = torch.as_tensor(clustering.fit_predict(distances.cpu().numpy()), device=masks.device)
    numbers = torch.arange(int(labels.max()) + 1, device=masks.device)
    members = (labels == numbers[:, None]).to(distances.dtype)  # (M, channels)
    # Sort clusters by their first masks, because their labels depend on the order of merging
    first, order = members.argmax(1).sort()
    means = torch.einsum("mc,cij->mij", members / members.sum(1, keepdim=True), masks.to(members.dtype))
    return means[order].to(masks.dtype), first


def coverage_corrected_sum(masks: Masks, scores: Tensor, chunk_size: int = 256) -> Tensor:
    """Compute Σ_i s_i m_i / ρ with the coverage ρ = Σ_i m_i / M, and 0 where ρ = 0 (Equation 5).

    Of M masks m with scores s (M,), `chunk_size` of them in memory: in `finest_dtype`, (H, W).
    """
    total, covered = weighted_sums(masks, torch.stack([scores, torch.ones_like(scores)]), chunk_size)
    # Rounding errors of the up-sampling must not count as coverage
    return len(scores) * torch.where(covered > 1e-5, total / covered.clamp(min=1e-5), 0)


def overdetermination(scores: Sequence[Tensor]) -> dict[str, Tensor]:
    """Compute whether the mean causal impact μ of an image's masks is above 0.9 (ViT-CX, Section 3.4).

    Args:
        scores: causal impacts of the masks of each image, (M,) each.

    Returns:
        `overdetermined`, 1 or 0, and `impact_variance`, the variance of the impacts, NaN unless the image is
        overdetermined. (B,) each; NaN for an image without masks.

    >>> numbers = overdetermination([torch.tensor([1.0, 0.9]), torch.tensor([0.5])])
    >>> numbers["overdetermined"].tolist(), numbers["impact_variance"].tolist()
    ([1.0, 0.0], [0.0025..., nan])
    """
    means = torch.stack([each.mean() for each in scores])
    variances = torch.stack([(each - each.mean()).square().mean() for each in scores])
    overdetermined = means > 0.9
    return {
        "overdetermined": overdetermined.float().masked_fill(means.isnan(), torch.nan),
        "impact_variance": variances.masked_fill(~overdetermined, torch.nan),
    }


@dataclass(frozen=True)
class ImageMasks:
    """The masks of one image.

    Args:
        masks: m, see `Masks`.
        noise: number of the noise of each mask, (M,).
        similarity: mean cosine of the feature maps before they are merged, a scalar; NaN for random masks.
    """

    masks: Masks
    noise: Tensor
    similarity: Tensor

    def __len__(self) -> int:
        return len(self.noise)


class ViTCX(SoftMaskMethod):
    """Sum of masks from clustered feature maps, weighted by their causal impact and corrected for coverage.

    The causal impact of a mask m is s = f(y | X ⊙ m + ε) + f(y | X) − f(y | X + ε), where ε is normal noise N(0, σ²)
    times 1 − m (Equation 2). Every mask has its own noise, which is the same for all images. Constant channels give no
    mask, and the heatmap of an image without masks is 0. Heatmaps have the scale of Equation 5: M times a score.

    The variants of the paper's Table 2 are `delta=0` (feature maps without clusters), `random=5000`, `sigma=0` (the
    impact is f(y | X ⊙ m)) and `combine=sum`.

    Args:
        features: the feature maps that give the masks, see `attention_features`.
        block: index of the transformer block, for Swin in the second-to-last stage; negative from the last.
        delta: δ, cosine distance at and above which masks are not merged; the paper has 0.05 for Swin.
        sigma: σ, standard deviation of the noise, in units of normalised pixels.
        combine: `corrected` is S^c (Equation 5); `sum` is S, without correction for coverage (Equation 1); `coverage`
            is the coverage ρ itself (Figure 6), which depends on no class.
        random: number of random masks as in RISE, which replace those of feature maps; `None` for none.
        released: scale the mean mask of each cluster to [0, 1] again, as the authors' code does and the paper does not.
        seed: seed of the noise and of the random masks.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        features: Features = "attention",
        block: int = -1,
        delta: float = 0.1,
        sigma: float = 0.1,
        combine: Literal["corrected", "sum", "coverage"] = "corrected",
        random: int | None = None,
        released: bool = False,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(target, grid, chunk_size=chunk_size)
        check_range(0, delta=delta, sigma=sigma)
        self.features = features
        self.block = block
        self.delta = delta
        self.sigma = sigma
        self.combine = combine
        self.random = random
        self.released = released
        self.seed = seed
        self.passes_vary = random is None and combine != "coverage"
        self.ignores_classes = combine == "coverage"
        attention_module(target, block, features)  # raises an InputError now rather than in the first batch
        if random is None:
            needs("sklearn", "methods", "ViTCX")
        else:
            check_positive(random=random)

    @property
    def forward_passes(self) -> int:
        """Upper bound: two for each channel. Clustering merges 768 channels to about 63 masks (Section 3.2)."""
        masks = self.random or attention_channels(self.target)
        of_masks = 0 if self.combine == "coverage" else masks * (2 if self.sigma else 1) + bool(self.sigma)
        return of_masks + (self.random is None)

    @torch.no_grad()
    def masks(self, normalised: Tensor) -> list[ImageMasks]:
        """Compute the masks of each image, (B, C, H, W)."""
        size, device = self.grid.size, normalised.device
        if self.random is not None:
            masks = RandomMasks(self.random, size=size, seed=self.seed, device=device)
            numbers, unknown = torch.arange(self.random, device=device), torch.tensor(torch.nan, device=device)
            return [ImageMasks(masks, numbers, unknown)] * len(normalised)
        images = []
        for part in normalised.split(self.chunk_size):
            features = attention_features(self.target, part, self.block, self.features).float()
            for channels in features.permute(0, 3, 1, 2):
                scaled, varies = unit_range(channels, size)
                distances = cosine_distances(scaled[varies], size)
                maps, first = cluster_masks(scaled[varies], distances, self.delta)
                maps = unit_range(maps, size)[0] if self.released else maps
                images.append(ImageMasks(upsample_masks(maps, size), first, mean_similarity(distances)))
        return images

    @torch.no_grad()
    def scores(self, normalised: Tensor, classes: Tensor, images: Sequence[ImageMasks]) -> list[Tensor]:
        """Compute the causal impact of each image's masks → (M,) each (Equation 2). A chunk can span several images."""
        counts = [len(own) for own in images]
        numbers = torch.cat([torch.arange(count) for count in counts]).to(normalised.device)
        image = torch.arange(len(images)).repeat_interleave(torch.tensor(counts)).to(normalised.device)
        of_noise = torch.cat([own.noise for own in images])

        def pixels(pairs: Tensor) -> Tensor:
            of_images = [(images[i], numbers[pairs[image[pairs] == i]]) for i in image[pairs].unique().tolist()]
            return torch.cat([own.masks(chosen) for own, chosen in of_images])

        def noise(pairs: Tensor) -> Tensor:
            return self.sigma * gaussian_noise(of_noise[pairs], normalised.shape[1:], self.seed)

        def probabilities(background: Callable[[Tensor], Tensor] | None) -> Tensor:
            return score_soft_masks(self.target, normalised, classes, image, pixels, background, self.chunk_size)

        if not self.sigma:
            return list(probabilities(None).split(counts))
        chunks = zip(normalised.split(self.chunk_size), classes.split(self.chunk_size), strict=True)
        clean = torch.cat([self.target.score_images(part).take_along_dim(y[:, None], 1)[:, 0] for part, y in chunks])
        noisy = probabilities(lambda pairs: normalised[image[pairs]] + noise(pairs))  # f(y | X + ε)
        return list((probabilities(noise) + (clean[image] - noisy)).split(counts))

    def saliency(self, normalised: Tensor, classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        masks = self.masks(normalised)
        counts = torch.tensor([len(own) for own in masks], device=normalised.device)
        numbers = {"masks": counts, "mask_similarity": torch.stack([own.similarity for own in masks])}
        if self.combine == "coverage":
            scores = [normalised.new_full((len(own),), 1 / max(1, len(own))) for own in masks]
        else:
            scores = self.scores(normalised, classes, masks)
            numbers |= overdetermination(scores)
        pixels = [self._combine_masks(own.masks, each).float() for own, each in zip(masks, scores, strict=True)]
        return torch.stack(pixels), numbers

    def _combine_masks(self, masks: Masks, scores: Tensor) -> Tensor:
        if self.combine == "corrected":
            return coverage_corrected_sum(masks, scores, self.chunk_size)
        return weighted_sums(masks, scores[None], self.chunk_size)[0]
