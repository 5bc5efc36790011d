"""Random resized crops and flips on the device, the same for a sample however the data are loaded."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.sampling import uniform


def random_resized_crop(images: Tensor, index: Tensor, seed: int, min_scale: float = 0.2) -> Tensor:
    """A random crop of each image, resized to the whole image, and flipped half of the time.

    Area in [`min_scale`, 1] of the image, aspect ratio in [3/4, 4/3] (log-uniform), as torchvision's RandomResizedCrop.

    Args:
        images: uint8, (B, C, H, W).
        index: which image of the data set, (B,): with `seed` it determines the crop.
    """
    scale, ratio, row, column, flip = uniform(index[:, None] * 5 + torch.arange(5, device=index.device), seed).unbind(1)
    area = min_scale + (1 - min_scale) * scale
    aspect = ((2 * ratio - 1) * math.log(4 / 3)).exp()
    width, height = (
        (area * aspect).sqrt().clamp(max=1),
        (area / aspect).sqrt().clamp(max=1),
    )  # (B,), of the image's side
    zero = torch.zeros_like(width)
    theta = torch.stack(
        [
            torch.stack([width * torch.where(flip < 0.5, -1, 1), zero, (2 * column - 1) * (1 - width)], -1),
            torch.stack([zero, height, (2 * row - 1) * (1 - height)], -1),
        ],
        1,
    )  # (B, 2, 3): from the crop's coordinates to the image's, both in [-1, 1]
    where = F.affine_grid(theta.float(), list(images.shape), align_corners=False)
    cropped = F.grid_sample(images.float(), where, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.round().clamp(0, 255).byte()
