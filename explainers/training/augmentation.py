"""Random resized crops and flips on the device; they do not depend on how the data are loaded."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.sampling import uniform


def random_resized_crop(images: Tensor, index: Tensor, seed: int, min_scale: float = 0.2) -> Tensor:
    """Crop each image at random, resize the crop to the size of the image, and flip it with probability 1/2.

    The area of a crop, as a fraction of the image, is uniform in [`min_scale`, 1]. Its aspect ratio is log-uniform in
    [3/4, 4/3], as in torchvision's RandomResizedCrop. A side longer than that of the image is shortened to it.

    Args:
        images: uint8, (B, C, H, W).
        index: index of each image in the data set, (B,); `index` and `seed` determine the crop.
        seed: a different one for every epoch, see `sampling.stream`.
        min_scale: area of the smallest crop, as a fraction of the image.

    Returns:
        uint8, (B, C, H, W).

    Equal index and seed give equal crops:

    >>> images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(3, 1, 8, 8)
    >>> crops = random_resized_crop(images, index=torch.tensor([5, 5, 6]), seed=0)
    >>> torch.equal(crops[0], crops[1]), torch.equal(crops[0], crops[2])
    (True, False)
    """
    scale, ratio, row, column, flip = uniform(index[:, None] * 5 + torch.arange(5, device=index.device), seed).unbind(1)
    area = min_scale + (1 - min_scale) * scale
    aspect = ((2 * ratio - 1) * math.log(4 / 3)).exp()
    width = (area * aspect).sqrt().clamp(max=1)  # (B,), as a fraction of the image's width
    height = (area / aspect).sqrt().clamp(max=1)  # (B,), as a fraction of the image's height
    zero = torch.zeros_like(width)
    theta = torch.stack(
        [
            torch.stack([width * torch.where(flip < 0.5, -1, 1), zero, (2 * column - 1) * (1 - width)], -1),
            torch.stack([zero, height, (2 * row - 1) * (1 - height)], -1),
        ],
        1,
    )  # (B, 2, 3): maps coordinates of the crop to coordinates of the image, both in [-1, 1]
    positions = F.affine_grid(theta.float(), list(images.shape), align_corners=False)
    cropped = F.grid_sample(images.float(), positions, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.round().clamp(0, 255).byte()
