"""What a model sees of a photo, and where in the photo that is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from explainers.errors import InputError, check_choices
from explainers.images.decoding import scale_size
from explainers.masking import read_size

Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a rectangle in a photo, in pixels; beyond its edges where it is padded."""

Resize = Literal["center", "squash", "border"]
"""How a photo becomes as large as the model's images: timm's names."""

Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]

ELONGATED = 10
"""Resized pixels for each pixel that the model sees, above which only these are resized, to save memory."""


@dataclass(frozen=True)
class ImageTransform:
    """How photos become the images that a model was trained to see, and the inverse: where in the photo they are.

    The photo is resized to height and width `size` / `crop_pct`, rounded down, and the middle `size` is cropped.

    Args:
        size: height and width of the model's images, in pixels.
        resize: `center` keeps the aspect ratio, and the photo covers the resized rectangle; `border` keeps it, and the
            photo fits in, with `fill` around it; `squash` stretches the photo to the rectangle.
        crop_pct: fraction of the resized height and width that the model sees, above 0 and at most 1.
        interpolation: name of Pillow's filter; all but `nearest` are antialiased.
        fill: value of each channel beside a photo, from 0 to 255, the mean of the model's channels.
        rounds: round the first row and column of the crop to the nearest integer, as timm and torchvision do;
            otherwise down, as transformers does.
    """

    size: tuple[int, int] = (224, 224)
    resize: Resize = "center"
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    fill: tuple[int, ...] = (0, 0, 0)
    rounds: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", read_size(self.size))  # configs give one number, or lists
        object.__setattr__(self, "fill", tuple(self.fill))
        chosen = {"resize": self.resize, "interpolation": self.interpolation}
        check_choices(chosen, {"resize": Resize, "interpolation": Interpolation})
        if not 0 < self.crop_pct <= 1:
            raise InputError(f"expected crop_pct (crop_fraction) to be above 0 and at most 1, got {self.crop_pct}")

    @classmethod
    def from_timm(cls, config: Mapping[str, Any], size: tuple[int, int]) -> "ImageTransform":
        """Make the transform of a data config of timm, which `timm.data.resolve_model_data_config` returns."""
        fill = tuple(round(255 * value) for value in config["mean"])
        return cls(size, config["crop_mode"], config["crop_pct"], config["interpolation"], fill)

    def __call__(self, photo: Image.Image) -> Tensor:
        """Return what the model sees of an upright photo of C channels: uint8 (C, H, W)."""
        return torch.from_numpy(np.array(self.show(photo)).reshape(*self.size, -1)).permute(2, 0, 1).contiguous()

    def show(self, photo: Image.Image) -> Image.Image:
        """Return what the model sees of an upright photo as an image of H × W pixels."""
        height, width = self.size
        resampling = Image.Resampling[self.interpolation.upper()]
        resized, left, top = self.place(*photo.size)
        if math.prod(resized) > ELONGATED * math.prod(self.size):
            return photo.resize((width, height), resampling, self.box(*photo.size))
        whole = photo.resize(resized, resampling)
        if resized[0] >= width and resized[1] >= height:
            return whole.crop((left, top, left + width, top + height))
        padded = Image.new(photo.mode, (width, height), self.fill[: len(photo.getbands())])
        padded.paste(whole, (-left, -top))
        return padded

    def __str__(self) -> str:
        """Say what becomes of a photo, in a few words.

        >>> str(ImageTransform()), str(ImageTransform(resize="squash", crop_pct=0.875))
        ('photos cropped to 224 x 224 (bicubic)', 'photos squashed to 224 x 224, the middle 88 % (bicubic)')
        """
        how = {"center": "cropped", "squash": "squashed", "border": "padded"}[self.resize]
        part = f", the middle {self.crop_pct:.0%}".replace("%", " %") if self.crop_pct < 1 else ""
        return f"photos {how} to {self.size[0]} x {self.size[1]}{part} ({self.interpolation})"

    def box(self, width: int, height: int) -> Box:
        """Return the rectangle of a photo of `width` × `height` pixels that the model sees.

        >>> ImageTransform().box(400, 200), ImageTransform(resize="border").box(400, 200)
        ((100.0, 0.0, 300.0, 200.0), (0.0, -100.0, 400.0, 300.0))
        """
        (across, down), left, top = self.place(width, height)
        x, y = width / across, height / down
        return left * x, top * y, (left + self.size[1]) * x, (top + self.size[0]) * y

    def place(self, width: int, height: int) -> tuple[tuple[int, int], int, int]:
        """Return width and height of a resized photo, and the first column and row that the model sees in it.

        Both are negative where there is a border.
        """
        # 224 / (224 / 232) is below 232 by rounding
        rows, columns = (math.floor(side / self.crop_pct + 1e-6) for side in self.size)
        if self.resize == "squash":
            resized = columns, rows
        elif self.resize == "center" and rows == columns:
            resized = scale_size((width, height), rows)
        else:
            choose = max if self.resize == "border" else min
            ratio = choose(height / rows, width / columns)
            # timm resizes a very narrow photo to no pixels, which Pillow refuses
            resized = max(round(width / ratio), 1), max(round(height / ratio), 1)
        left, top = (self._offset(whole - seen) for whole, seen in zip(resized, self.size[::-1], strict=True))
        return resized, left, top

    def _offset(self, excess: int) -> int:
        """Return the first row or column of a crop from `excess` more pixels than it has; negative with a border."""
        if excess < 0:
            return -(-excess // 2)
        return round(excess / 2) if self.rounds else excess // 2
