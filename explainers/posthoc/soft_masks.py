"""Soft masks from feature maps: scores of masked images, similarity and sums of masks, noise, means over patches."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.runtime.modes import finest_dtype
from explainers.runtime.progress import advance

Size = tuple[int, int]
"""H and W, height and width of an image, in pixels."""
Masks = Callable[[Tensor], Tensor]
"""Function from numbers of masks (n,) to the masks, (n, 1, H, W) in [0, 1]."""


def score_soft_masks(
    target: TargetModel,
    normalised: Tensor,
    classes: Tensor,
    image: Tensor,
    masks: Masks,
    background: Callable[[Tensor], Tensor] | None = None,
    chunk_size: int = 256,
) -> Tensor:
    """Compute f(y | X ⊙ m + (1 − m) ⊙ background) for pairs of an image X and a soft mask m.

    Args:
        target: the model f.
        normalised: images, (B, C, H, W).
        classes: the class y of each image, (B,).
        image: index of the image of each pair, (pairs,).
        masks: function from indices of pairs (n,) to their masks.
        background: function from indices of pairs (n,) to values of hidden pixels (n, C, H, W); `None` for 0.
        chunk_size: maximum number of masked images in memory.

    Returns:
        Scores of the classes, (pairs,).
    """
    if not len(image):
        return normalised.new_empty(0)
    scores = []
    for pairs in torch.arange(len(image), device=normalised.device).split(chunk_size):
        mask, which = masks(pairs), image[pairs]
        masked = normalised[which] * mask
        if background is not None:
            masked = masked + (1 - mask) * background(pairs)
        scores.append(target.score_images(masked).take_along_dim(classes[which, None], 1)[:, 0])
        advance(len(pairs))
    return torch.cat(scores)


def patch_means(pixels: Tensor, grid: PatchGrid) -> Tensor:
    """Average maps (B, H, W) over the pixels of each patch → (B, rows, columns)."""
    grid.check(pixels)
    return F.avg_pool2d(pixels[:, None], grid.patch_size)[:, 0]


def upsample(maps: Tensor, size: Size) -> Tensor:
    """Up-sample maps (n, h, w) to `size`, (n, H, W), bilinearly."""
    return F.interpolate(maps[:, None], size, mode="bilinear", align_corners=False)[:, 0]


def upsample_masks(maps: Tensor, size: Size) -> Masks:
    """Return the masks that are up-samplings of maps (M, h, w) to `size`."""
    return lambda numbers: upsample(maps[numbers], size)[:, None].clamp(0, 1)


def weighted_sums(masks: Masks, weights: Tensor, chunk_size: int = 256) -> Tensor:
    """Compute Σ_i w_i m_i for several weightings of the same masks, with `chunk_size` masks in memory.

    Of M ≥ 1 masks m, with weights w (n, M): in `finest_dtype`, (n, H, W).
    """
    chunks = torch.arange(weights.shape[1], device=weights.device).split(chunk_size)
    dtype = finest_dtype(weights.device)
    sums = [torch.einsum("nm,mij->nij", weights[:, part].to(dtype), masks(part)[:, 0].to(dtype)) for part in chunks]
    return torch.stack(sums).sum(0)


def cosine_distances(maps: Tensor, size: Size) -> Tensor:
    """Compute 1 − cos between the bilinear up-samplings of maps (n, h, w) to `size` → (n, n), in `finest_dtype`.

    The up-sampling of a map m is U m Vᵀ, and the inner product of two is Σ m ⊙ (G m' G'), where G = Uᵀ U and
    G' = Vᵀ V. So no tensor of the size of the image is computed.
    """
    matrices = [upsampling_matrix(*sizes, maps.device) for sizes in zip(maps.shape[-2:], size, strict=True)]
    (rows, columns), maps = (each.mT @ each for each in matrices), maps.to(matrices[0].dtype)
    products = maps.flatten(1) @ (rows @ maps @ columns).flatten(1).mT
    length = products.diagonal().clamp(min=torch.finfo(products.dtype).tiny).sqrt()
    distances = 1 - products / (length[:, None] * length)
    return ((distances + distances.mT) / 2).clamp(min=0).fill_diagonal_(0)


def mean_similarity(distances: Tensor) -> Tensor:
    """Compute mSim, the mean cosine of all pairs (ViT-CX, Section 3.2), from `cosine_distances`; NaN without a pair."""
    count = len(distances)
    return 1 - distances.sum() / (count * (count - 1))


def upsampling_matrix(tokens: int, size: int, device: torch.device) -> Tensor:
    """Compute U (size, tokens), in `finest_dtype`: the bilinear up-sampling of a map m is U m Vᵀ.

    >>> upsampling_matrix(2, 4, torch.device("cpu")).tolist()
    [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]]
    """
    unit = torch.eye(tokens, dtype=finest_dtype(device), device=device)
    return F.interpolate(unit[None], size, mode="linear", align_corners=False)[0].mT


def unit_range(maps: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Scale maps (n, h, w) so that their bilinear up-sampling to `size` has the minimum 0 and the maximum 1.

    The up-sampled map need not reach the extremes of the map itself. It is bilinear between four neighbouring tokens,
    so its extremes lie at the corner pixels of that square. Only these pixels are computed.

    Returns:
        The scaled maps, 0 if the map is constant; and for each map whether it varies, boolean (n,).
    """
    rows, columns = (_corners(*sizes, maps.device) for sizes in zip(maps.shape[-2:], size, strict=True))
    extreme = (rows @ maps.to(rows.dtype) @ columns.mT).flatten(1)
    low, high = extreme.amin(1)[:, None, None], extreme.amax(1)[:, None, None]
    varies = high - low > 1e-6 * torch.maximum(low.abs(), high.abs())  # smaller differences are rounding errors
    scaled = torch.where(varies, (maps - low) / torch.where(varies, high - low, 1), 0)
    return scaled.to(maps.dtype), varies.flatten()


def _corners(tokens: int, size: int, device: torch.device) -> Tensor:
    """The rows of the `upsampling_matrix` of pixels next to a border between the squares of four tokens."""
    centre = (torch.arange(size, device=device).float() + 0.5) * tokens / size - 0.5
    changes = F.pad(centre.clamp(min=0).floor().diff() != 0, (1, 1), value=True)
    return upsampling_matrix(tokens, size, device)[changes[1:] | changes[:-1]]


def gaussian_noise(numbers: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    """Draw standard normal noise (n, *shape), float32; each row depends only on its number (n,) and the seed.

    The CPU draws it, because generators of other devices draw other values.
    """
    rows = {}
    for number in set(numbers.tolist()):
        generator = torch.Generator().manual_seed(1_000_003 * seed + number)
        rows[number] = torch.randn(*shape, generator=generator, dtype=torch.float32).to(
            numbers.device, non_blocking=True
        )
    return torch.stack([rows[number] for number in numbers.tolist()])
