"""What a model sees of a photo, and where in the photo that is."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from explainers.images.decoding import middle_square

Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a rectangle in a photo, in pixels; beyond its edges where it is padded."""


@dataclass(frozen=True)
class ImageTransform:
    """How photos become the images that a model was trained to see, and the inverse: where in the photo they are.

    Args:
        size: height and width of the model's images, in pixels.
        interpolation: name of Pillow's filter.
    """

    size: tuple[int, int] = (224, 224)
    interpolation: str = "bicubic"

    def __call__(self, photo: Image.Image) -> Tensor:
        """Return what the model sees of an upright photo of C channels: uint8 (C, H, W)."""
        filter_ = getattr(Image.Resampling, self.interpolation.upper(), Image.Resampling.BICUBIC)
        square = middle_square(photo, self.size[0], filter_)
        return torch.from_numpy(np.array(square).reshape(*self.size, -1)).permute(2, 0, 1).contiguous()

    def see(self, photo: Image.Image) -> tuple[Tensor, Box]:
        """Return what the model sees of an upright RGB photo, uint8 (3, H, W), and where in the photo it is."""
        return self(photo), self.box(*photo.size)

    def box(self, width: int, height: int) -> Box:
        """Return the rectangle of a photo of `width` × `height` pixels that the model sees.

        >>> ImageTransform().box(400, 200)
        (100.0, 0.0, 300.0, 200.0)
        """
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side
