"""Explainers that read the probability of a class under masks: Occlusion, RISE and Score-CAM.

RISE and Score-CAM multiply normalised images with soft masks, so a hidden pixel gets the mean colour, 0. The masks of
an image do not depend on the other images of its batch.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers import Details
from explainers.errors import InputError, check_positive, check_range, checks_choices
from explainers.masking import PatchGrid, Removal, map_shape, neighbourhoods
from explainers.models import TargetModel
from explainers.models.inputs import validate_classes
from explainers.models.removal import check_removal, masked_scores
from explainers.posthoc.soft_masks import (
    Size,
    cosine_distances,
    mean_similarity,
    patch_means,
    score_soft_masks,
    unit_range,
    upsample,
    upsample_masks,
    upsampling_matrix,
    weighted_sums,
)
from explainers.runtime.modes import finest_dtype
from explainers.runtime.sampling import uniform


class MaskMethod(nn.Module):
    """Base class of methods that score patches by the probability of a class under masks.

    Args:
        target: the model to explain.
        grid: the patches that are explained.
        removal: what replaces hidden patches, see `masking.Removal`.
        chunk_size: maximum number of masked images in memory.
    """

    signed: bool = True

    @checks_choices
    def __init__(self, target: TargetModel, grid: PatchGrid, removal: Removal = "zero", chunk_size: int = 256) -> None:
        super().__init__()
        check_removal(target, removal)
        check_positive(chunk_size=chunk_size)
        target.check_grid(grid)
        self.target = target.in_eval_mode()
        self.grid = grid
        self.removal = removal
        self.chunk_size = chunk_size

    @torch.no_grad()
    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class (B,) of each uint8 image (B, C, H, W): heatmaps (B, rows, columns)."""
        return self.patch_scores(*self._prepare(images, classes)).unflatten(-1, self.grid.shape)

    def patch_scores(self, normalised: Tensor, classes: Tensor) -> Tensor:
        """Explain classes (B,) of normalised images (B, C, H, W): scores of patches (B, N)."""
        raise NotImplementedError

    def score_masks(self, normalised: Tensor, classes: Tensor, keep: Tensor) -> Tensor:
        """Compute the scores (B, M) of classes (B,) where only the patches `keep` (B, M, N) are visible."""
        return masked_scores(self.target, normalised, classes, keep, self.grid, self.removal, self.chunk_size)

    def _prepare(self, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Check uint8 images and their classes, and return normalised images and the classes."""
        self.grid.check(images)
        classes = validate_classes(classes, images, self.target.num_classes)
        return self.target.normalise(images), classes


class SoftMaskMethod(MaskMethod):
    """Base class of methods of soft masks: a heatmap is the mean of a saliency map of pixels over each patch."""

    signed = False

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return self.details(images, classes).heatmaps

    @torch.no_grad()
    def details(self, images: Tensor, classes: Tensor) -> Details:
        """Explain images, with saliency maps of pixels; see `metrics.numbers` for the names of the numbers."""
        pixels, numbers = self.saliency(*self._prepare(images, classes))
        return Details(patch_means(pixels, self.grid), pixels, numbers)

    def saliency(self, normalised: Tensor, classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute saliency maps (B, H, W) of normalised images (B, C, H, W), and numbers (B,) by their names."""
        raise NotImplementedError


class Occlusion(MaskMethod):
    """f(y | X) − f(y | X without a window around the patch), for every patch (Zeiler & Fergus, 2014).

    Args:
        window: side of the hidden window, in patches; odd.
        cells: hide each of `cells` × `cells` cells instead, at most as many as patches, and interpolate the differences
            from the middles of cells to those of patches: a map of few passes. `None` for windows.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        window: int = 1,
        cells: int | None = None,
        removal: Removal = "zero",
        chunk_size: int = 256,
    ) -> None:
        super().__init__(target, grid, removal, chunk_size)
        if window < 1 or window % 2 == 0:
            raise InputError(f"expected an odd window, which has a patch in its middle, got window={window}")
        if cells is None:
            near = neighbourhoods(grid, window // 2)
        else:
            check_positive(cells=cells)
            near = divide_grid(grid.shape, cells)
        self.cells = cells
        self.forward_passes = len(near) + 1
        self.register_buffer("near", near, persistent=False)
        self.near: Tensor

    def patch_scores(self, normalised: Tensor, classes: Tensor) -> Tensor:
        near = self.near.to(normalised.device)
        keep = torch.cat([torch.ones_like(near[:1]), ~near]).expand(len(normalised), -1, -1)  # (B, 1 + N, N)
        scores = self.score_masks(normalised, classes, keep)
        drops = scores[:, :1] - scores[:, 1:]
        if self.cells is None:
            return drops
        rows = min(self.cells, self.grid.shape[0])
        coarse = drops.unflatten(1, (rows, -1))[:, None]
        return F.interpolate(coarse, size=self.grid.shape, mode="bilinear", align_corners=False).flatten(1)


def divide_grid(shape: tuple[int, int], cells: int) -> Tensor:
    """Divide the patches of a grid of rows × columns into `cells` × `cells` cells, or fewer: boolean (cells², N).

    >>> divide_grid((2, 4), 2).int().tolist()
    [[1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1]]
    """
    rows, columns = (torch.arange(size) * min(cells, size) // size for size in shape)
    number = rows[:, None] * min(cells, shape[1]) + columns
    return number.flatten() == torch.arange(int(number.max()) + 1)[:, None]


class RandomMasks:
    """RISE's masks (Petsiuk et al., 2018, Section 3.2): random grids, up-sampled and cropped.

    A cell is up-sampled to ⌈H / cells⌉ × ⌈W / cells⌉ pixels. A grid of `cells` × `cells` is up-sampled to the size of
    `cells` + 1 such cells along each side, and cropped to H × W pixels at a random place.

    Args:
        count: M, number of masks, the same for all images.
        cells: cells per side.
        probability: probability that a cell is visible.
        size: H and W, height and width of the image in pixels.
        seed: seed of the cells and the shifts.
        device: where the masks are computed.
    """

    def __init__(
        self, count: int, cells: int = 7, probability: float = 0.5, *, size: Size, seed: int, device: torch.device
    ) -> None:
        pixels = [-(-side // cells) for side in size]
        self.size = size
        numbers = torch.arange(count * (cells**2 + 2), device=device).view(count, -1)
        draws = uniform(numbers, seed)
        self.cells = (draws[:, 2:] < probability).to(finest_dtype(device)).view(count, cells, cells)
        shifts = draws[:, :2] * torch.tensor(pixels, device=device)
        self.shifts = shifts.long()  # (M, 2): row and column, below pixels
        # In float64, like all products of matrices here: autocast would compute them in bfloat16
        self.weights = [upsampling_matrix(cells, (cells + 1) * each, device) for each in pixels]

    def __call__(self, numbers: Tensor) -> Tensor:
        """Compute the masks of these numbers (n,) → (n, 1, H, W), in [0, 1]."""
        shifts = self.shifts[numbers].mT[..., None]  # (2, n, 1)
        rows, columns = (  # (n, H, cells) and (n, W, cells)
            weights[shift + torch.arange(side, device=numbers.device)]
            for weights, shift, side in zip(self.weights, shifts, self.size, strict=True)
        )
        return (rows @ self.cells[numbers] @ columns.mT)[:, None].float()


class RISE(SoftMaskMethod):
    """Random masks m_i, weighted by their scores: Σ_i f(y | X ⊙ m_i) m_i / (p · M) (Petsiuk et al., 2018, Equation 6).

    Petsiuk et al. use 4000 masks for a CNN at 224 × 224 pixels and 8000 for a deeper CNN; TVE uses 50, ViT-CX 5000.

    Args:
        masks: M, number of masks; all images get the same ones.
        cells: cells of a mask per side.
        probability: p, probability that a cell is visible.
        seed: seed of the masks.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        masks: int = 4000,
        cells: int = 7,
        probability: float = 0.5,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(target, grid, chunk_size=chunk_size)
        check_positive(masks=masks, cells=cells, probability=probability)
        check_range(0, 1, probability=probability)
        self.masks = self.forward_passes = masks
        self.cells = cells
        self.probability = probability
        self.seed = seed

    def saliency(self, normalised: Tensor, classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        count, size, device = self.masks, self.grid.size, normalised.device
        masks = RandomMasks(count, self.cells, self.probability, size=size, seed=self.seed, device=device)
        image = torch.arange(len(normalised), device=device).repeat_interleave(count)
        scores = score_soft_masks(
            self.target, normalised, classes, image, lambda pairs: masks(pairs % count), chunk_size=self.chunk_size
        )
        scores = scores.view(-1, count)
        if self.target.score == "value":  # which has no natural zero: a large mean would show the density of the masks
            scores = scores - scores.mean(1, keepdim=True)
        sums = weighted_sums(masks, scores, self.chunk_size)
        return (sums / (self.probability * count)).float(), {}


class ScoreCAM(SoftMaskMethod):
    """Feature maps, each weighted by the score of the image that it masks (Wang et al., 2020).

    `sum` is Score-CAM as ViT-CX applies it to transformers (its Equation 1): Σ_c f(y | X ⊙ m_c) m_c, where the mask m_c
    is the feature map x_c of channel c, up-sampled and scaled to [0, 1]. `softmax` is Score-CAM as Wang et al. define
    it for CNNs: ReLU(Σ_c α_c x_c), where α is the softmax of these scores over the channels. They first subtract the
    score of a blank image, which does not change the softmax and is left out here. In a transformer x_c has both signs,
    so this ReLU can set a whole heatmap to 0.

    Args:
        combine: formula of the heatmap, `sum` or `softmax`.
        block: index of the transformer block, or of the stage of Swin and ResNet; negative from the last.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        combine: Literal["sum", "softmax"] = "sum",
        block: int = -1,
        chunk_size: int = 256,
    ) -> None:
        super().__init__(target, grid, chunk_size=chunk_size)
        blocks = len(getattr(target.backbone, "feature_info", []))
        self.combine = combine
        self.block = block % blocks if -blocks <= block < 0 else block
        self.forward_passes = target.map_channels([self.block])[0] + 1

    def saliency(self, normalised: Tensor, classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        size, count = self.grid.size, len(normalised)
        chunks = [self.target.embed_with_maps(part, [self.block])[1][0] for part in normalised.split(self.chunk_size)]
        features = torch.cat(chunks).mT.float()  # (B, channels, h · w)
        features = features.unflatten(-1, map_shape(features.shape[-1], size))
        masks, varies = unit_range(features.flatten(0, 1), size)
        of_images = zip(masks.view_as(features), varies.view(count, -1), strict=True)
        similarity = torch.stack([mean_similarity(cosine_distances(own[which], size)) for own, which in of_images])
        image = torch.arange(count, device=normalised.device).repeat_interleave(features.shape[1])
        scores = score_soft_masks(
            self.target, normalised, classes, image, upsample_masks(masks, size), chunk_size=self.chunk_size
        ).view(count, -1)
        softmax = self.combine == "softmax"
        weights, maps = (scores.softmax(1), features) if softmax else (scores, masks.view_as(features))
        dtype = finest_dtype(normalised.device)
        weighted = upsample(torch.einsum("bc,bcij->bij", weights.to(dtype), maps.to(dtype)).float(), size)
        return weighted.relu() if softmax else weighted, {"mask_similarity": similarity}
