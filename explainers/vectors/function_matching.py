"""Images on which a self-explaining model is held to its teacher, in endless variety: mixtures of random crops.

Of few images, a model learns the teacher's embeddings by heart, and loses those of other images. Mixtures of crops
let it learn the teacher's function ("Knowledge distillation: A good teacher is patient and consistent", Beyer et al.,
2022).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.sampling import stream, uniform
from explainers.target import TargetModel
from explainers.vectors.prediction_losses import relative_error

SMALLEST = 0.4  # side of the smallest crop, relative to the image's


def mixed_crops(images: Tensor, index: Tensor, seed: int) -> Tensor:
    """Mix a random square crop of each image, scaled to the image's size, with that of the next image of the batch.

    Half of the crops are flipped. Every share of the two crops is equally likely.

    Args:
        images: uint8, (B, C, H, W).
        index: index of each image in the data set, (B,), on which its draws depend.
        seed: seed of the draws, a different one for every epoch.

    Returns:
        uint8, (B, C, H, W).
    """
    draws = uniform(index[:, None] * 5 + torch.arange(5, device=index.device), seed).float()
    side = SMALLEST + (1 - SMALLEST) * draws[:, 0]
    centre = (2 * draws[:, 1:3] - 1) * (1 - side)[:, None]  # in coordinates from −1 to 1
    flipped = torch.where(draws[:, 3] < 0.5, -side, side)
    rows = torch.stack([flipped, torch.zeros_like(side), centre[:, 0]], -1)
    columns = torch.stack([torch.zeros_like(side), side, centre[:, 1]], -1)
    places = F.affine_grid(torch.stack([rows, columns], 1), list(images.shape), align_corners=False)
    crops = F.grid_sample(images.float(), places, padding_mode="border", align_corners=False)
    share = draws[:, 4, None, None, None]
    return torch.lerp(crops.roll(1, 0), crops, share).round().to(torch.uint8)


def error_on_mixtures(model: TargetModel, teacher: TargetModel, rows: dict[str, Tensor], epoch: int) -> Tensor:
    """The `relative_error` of a model's embeddings of `mixed_crops`.

    Args:
        model: the model that learns.
        teacher: the model whose embeddings it keeps, on the fly: every epoch has other mixtures.
        rows: a batch with `image` and `index`.
        epoch: the epoch.
    """
    mixtures = model.normalise(mixed_crops(rows["image"], rows["index"], stream("mixtures", 0, epoch)))
    with torch.no_grad():
        wanted = teacher.embed(mixtures).float()
    embeddings = model.embed(mixtures).float()
    with torch.autocast(wanted.device.type, enabled=False):
        return relative_error(embeddings, wanted)
