"""ViT-CX (Xie et al., IJCAI 2023): masks from clustered feature maps, and their causal impact."""

from collections.abc import Callable

import torch
from sklearn.cluster import AgglomerativeClustering
from torch import Tensor, nn

from explainers.errors import check_positive, check_range, checks_choices
from explainers.masking import PatchGrid
from explainers.posthoc.soft_masks import (
    gaussian_noise,
    patch_means,
    soft_masked_scores,
    unit_range,
    upsample,
    upsampling_matrix,
)
from explainers.target import TargetModel
from explainers.target.inputs import checked_classes
from explainers.transformer.blocks import Features, attention_channels, attention_features, attention_module


def cosine_distances(masks: Tensor, size: int) -> Tensor:
    """Compute 1 − cos between the bilinear up-samplings of masks (n, h, w) to `size` → (n, n), float64.

    The up-sampling of a mask m is U m Uᵀ, and the inner product of two is Σ m ⊙ (G m' G), where G = Uᵀ U. So no tensor
    of the size of the image is computed.
    """
    matrix = upsampling_matrix(masks.shape[-1], size, masks.device)
    gram, masks = matrix.mT @ matrix, masks.double()
    products = masks.flatten(1) @ (gram @ masks @ gram).flatten(1).mT
    length = products.diagonal().clamp(min=1e-300).sqrt()
    distances = 1 - products / (length[:, None] * length)
    return ((distances + distances.mT) / 2).clamp(min=0).fill_diagonal_(0)


def cluster_masks(masks: Tensor, size: int, delta: float) -> tuple[Tensor, Tensor]:
    """Merge similar masks: agglomerative clustering with complete linkage on cosine distances (Section 3.2).

    Args:
        masks: one for each channel, (channels, h, w); they are compared after up-sampling to `size`.
        size: H = W of the image.
        delta: δ, cosine distance at and above which clusters are not merged; 0 merges nothing.

    Returns:
        The mean of the masks of each cluster (M, h, w), and the index of its first mask (M,), ascending.
    """
    if len(masks) < 2:
        return masks, torch.arange(len(masks), device=masks.device)
    clustering = AgglomerativeClustering(None, metric="precomputed", linkage="complete", distance_threshold=delta)
    labels = torch.as_tensor(clustering.fit_predict(cosine_distances(masks, size).cpu().numpy()), device=masks.device)
    members = (labels == torch.arange(int(labels.max()) + 1, device=masks.device)[:, None]).double()  # (M, channels)
    # Sort clusters by their first masks, because their labels depend on the order of merging
    first, order = members.argmax(1).sort()
    means = torch.einsum("mc,cij->mij", members / members.sum(1, keepdim=True), masks.double())
    return means[order].to(masks.dtype), first


def coverage_corrected_sum(masks: Tensor, scores: Tensor, size: int) -> Tensor:
    """Compute Σ_i s_i m_i / ρ with the coverage ρ = Σ_i m_i / M, and 0 where ρ = 0 (Equation 5).

    Args:
        masks: m, (M, h, w); their sums are up-sampled to `size`.
        scores: s, (M,).
        size: H = W of the image.

    Returns:
        (H, W).

    Both masks cover the left pixel; neither covers the right:

    >>> masks = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.5, 0.0], [0.5, 0.0]]])
    >>> coverage_corrected_sum(masks, torch.tensor([3.0, 6.0]), size=2)[0].tolist()
    [8.0, 0.0]
    """
    weighted = torch.einsum("m,mij->ij", scores.double(), masks.double())
    total, covered = upsample(torch.stack([weighted, masks.double().sum(0)]), size)
    # Rounding errors of the up-sampling must not count as coverage
    corrected = torch.where(covered > 1e-5, total / covered.clamp(min=1e-5), 0)
    return (len(masks) * corrected).to(scores.dtype)


class ViTCX(nn.Module):
    """Sum of masks from clustered feature maps, weighted by their causal impact and corrected for coverage.

    The causal impact of a mask m is s = f(y | X ⊙ m + ε) + f(y | X) − f(y | X + ε), where ε is normal noise N(0, σ²)
    times 1 − m (Equation 2). Every mask has its own noise, which is the same for all images. Constant channels give no
    mask, and the heatmap of an image without masks is 0. Heatmaps have the scale of Equation 5: M times a score.

    Args:
        target: the model to explain, see `attention_features`.
        grid: the patches over which the heatmap is averaged.
        features: the feature maps that give the masks, see `attention_features`.
        block: index of the transformer block, for Swin in the second-to-last stage; negative from the last.
        delta: δ, cosine distance at and above which masks are not merged; the paper has 0.05 for Swin.
        sigma: σ, standard deviation of the noise, in units of normalised pixels.
        released: scale the mean mask of each cluster to [0, 1] again, as the authors' code does and the paper does not.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the noise.
    """

    passes_vary = True

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        features: Features = "attention",
        block: int = -1,
        delta: float = 0.1,
        sigma: float = 0.1,
        released: bool = False,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_positive(chunk_size=chunk_size)
        check_range(0, delta=delta, sigma=sigma)
        target.check_grid(grid)
        self.target = target.eval()
        self.grid = grid
        self.features = features
        self.block = block
        self.delta = delta
        self.sigma = sigma
        self.released = released
        self.chunk_size = chunk_size
        self.seed = seed
        attention_module(target, block, features)  # raises an InputError now rather than in the first batch

    @property
    def forward_passes(self) -> int:
        """Upper bound: two for each channel. Clustering merges 768 channels to about 63 masks (Section 3.2)."""
        return (2 if self.sigma else 1) * (attention_channels(self.target) + 1)

    @torch.no_grad()
    def masks(self, normalised: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Compute the masks (M, h, w) of each image (B, C, H, W), and the first channel of each mask (M,)."""
        size = normalised.shape[-1]
        masks_and_channels = []
        for part in normalised.split(self.chunk_size):
            features = attention_features(self.target, part, self.block, self.features).float()
            for channels in features.permute(0, 3, 1, 2):
                scaled, varies = unit_range(channels, size)
                masks, first = cluster_masks(scaled[varies], size, self.delta)
                masks_and_channels.append((unit_range(masks, size)[0] if self.released else masks, first))
        return masks_and_channels

    @torch.no_grad()
    def scores(self, normalised: Tensor, classes: Tensor, masks: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Compute the causal impact of each image's masks → (M,) each (Equation 2). A chunk can span several images."""
        counts, size = [len(first) for _, first in masks], normalised.shape[-1]
        image = torch.arange(len(masks)).repeat_interleave(torch.tensor(counts)).to(normalised.device)
        maps, first = (torch.cat(parts) for parts in zip(*masks, strict=True))

        def noise(pairs: Tensor) -> Tensor:
            return self.sigma * gaussian_noise(first[pairs], normalised.shape[1:], self.seed)

        def probabilities(background: Callable[[Tensor], Tensor] | None) -> Tensor:
            return soft_masked_scores(
                self.target,
                normalised,
                classes,
                image,
                lambda pairs: upsample(maps[pairs], size)[:, None].clamp(0, 1),
                background,
                self.chunk_size,
            )

        if not self.sigma:
            return list(probabilities(None).split(counts))
        chunks = zip(normalised.split(self.chunk_size), classes.split(self.chunk_size), strict=True)
        clean = torch.cat([self.target.probabilities(part).take_along_dim(y[:, None], 1)[:, 0] for part, y in chunks])
        noisy = probabilities(lambda pairs: normalised[image[pairs]] + noise(pairs))  # f(y | X + ε)
        return list((probabilities(noise) + (clean[image] - noisy)).split(counts))

    @torch.no_grad()
    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        self.grid.check(images)
        classes = checked_classes(classes, images, self.target.num_classes)
        normalised, size = self.target.normalise(images), images.shape[-1]
        masks = self.masks(normalised)
        pairs = zip(masks, self.scores(normalised, classes, masks), strict=True)
        saliency = [coverage_corrected_sum(own, scores, size) for (own, _), scores in pairs]
        return patch_means(torch.stack(saliency), self.grid)
