"""Where the objects of images are, in pixels of a sample: boxes and masks follow their image through its transform."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.images.transform import ImageTransform

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
Size = tuple[int, int]  # height, width, in pixels


@dataclass(frozen=True)
class Crop:
    """What a sample shows of a stored image.

    Args:
        stored: height and width of the stored image.
        transform: how it becomes the sample of H × W pixels.
    """

    stored: Size
    transform: ImageTransform

    @property
    def resized(self) -> Size:
        """Height and width of the resized image."""
        width, height = self.transform.place(*self.stored[::-1])[0]
        return height, width

    @property
    def offset(self) -> Size:
        """First row and first column of the sample in the resized image; negative where it has a border."""
        _, left, top = self.transform.place(*self.stored[::-1])
        return top, left

    def of_mask(self, mask: Tensor) -> Tensor:
        """What the sample shows of a mask that is resized like the image, by nearest neighbours.

        Args:
            mask: any type, (rows, columns); it may have another scale than the stored image.

        Returns:
            The same type, (H, W): of each pixel's centre, the value of `mask` there; 0 beside the image.

        >>> mask = torch.arange(16).view(4, 4)
        >>> Crop((4, 4), ImageTransform((2, 2))).of_mask(mask).tolist()
        [[5, 7], [13, 15]]
        """
        for dim, (length, start) in enumerate(zip(self.transform.size, self.offset, strict=True)):
            own, side = mask.shape[dim], self.resized[dim]
            position = ((2 * (torch.arange(length) + start) + 1) * own).div(2 * side, rounding_mode="floor")
            beside = (position < 0) | (position >= own)
            mask = mask.index_select(dim, position.clamp(0, own - 1)).index_fill(dim, beside.nonzero()[:, 0], 0)
        return mask


class Truth(Protocol):
    """Where the objects are in the images of a data set."""

    def is_upright(self, position: int, image: Path) -> bool:
        """Whether places are those of the image file turned by its EXIF orientation; False for its stored rows."""

    def mask(self, position: int, crop: Crop) -> Tensor:
        """The pixels of the object in the crop of the image at a position: boolean (H, W)."""

    def contents(self, positions: Sequence[int]) -> Any:
        """What the masks of these images depend on, besides the images: JSON-serialisable."""


class Boxes:
    """Boxes around the objects of images.

    Args:
        boxes: boxes of every image.
        sizes: size of every image, in whose pixels its boxes are; the image may be stored at another scale. `None`:
            boxes are in pixels of the stored images.
    """

    def __init__(self, boxes: Sequence[Sequence[Box]], sizes: Sequence[Size] | None = None) -> None:
        self.boxes = boxes
        self.sizes = sizes

    def is_upright(self, position: int, image: Path) -> bool:
        """See `Truth`."""
        return False

    def mask(self, position: int, crop: Crop) -> Tensor:
        """See `Truth`; an InputError if the image has another aspect ratio than its boxes were drawn on."""
        drawn_on = crop.stored if self.sizes is None else self.sizes[position]
        check_scale("boxes", drawn_on, crop.stored)
        scale = (crop.resized[0] / drawn_on[0], crop.resized[1] / drawn_on[1])
        return box_mask(self.boxes[position], crop.transform.size, scale, crop.offset)

    def contents(self, positions: Sequence[int]) -> Any:
        """See `Truth`."""
        boxes = [self.boxes[i] for i in positions]
        return boxes if self.sizes is None else [boxes, [self.sizes[i] for i in positions]]


def box_mask(boxes: Sequence[Box], size: Size, scale: tuple[float, float], offset: Size) -> Tensor:
    """Mark the pixels of a resized and cropped image whose centres lie in one of the boxes: boolean (H, W).

    Args:
        boxes: boxes, in pixels of the image that they were drawn on.
        size: H and W, in pixels.
        scale: size of the resized image divided by the size of the image with the boxes, (height, width).
        offset: first (row, column) of the crop in the resized image.

    >>> box_mask([(2, 0, 6, 2)], (3, 3), scale=(0.5, 0.5), offset=(0, 0)).int().tolist()  # columns 1 and 2 of row 0
    [[0, 1, 1], [0, 0, 0], [0, 0, 0]]
    """
    mask = torch.zeros(size, dtype=torch.bool)
    row, column = (torch.arange(side) + 0.5 + start for side, start in zip(size, offset, strict=True))
    for left, top, right, bottom in boxes:
        inside_rows = (row >= top * scale[0]) & (row < bottom * scale[0])
        inside_columns = (column >= left * scale[1]) & (column < right * scale[1])
        mask |= inside_rows[:, None] & inside_columns
    return mask


def is_scaled(drawn_on: Size, stored: Size) -> bool:
    """Whether both sizes are one size at two scales; each side may be rounded to whole pixels.

    >>> is_scaled((375, 500), (256, 341)), is_scaled((500, 375), (256, 341))
    (True, False)
    """
    lowest = max((drawn - 1) / side for drawn, side in zip(drawn_on, stored, strict=True))
    highest = min((drawn + 1) / side for drawn, side in zip(drawn_on, stored, strict=True))
    return lowest < highest


def check_scale(name: str, drawn_on: Size, stored: Size) -> None:
    """Raise an InputError unless both sizes are one size at two scales, see `is_scaled`.

    Args:
        name: what was drawn on an image of another size, for the message.
        drawn_on: its height and width.
        stored: height and width of the stored image.
    """
    if not is_scaled(drawn_on, stored):
        (height, width), (rows, columns) = stored, drawn_on
        raise InputError(
            f"expected {name} of the image's size, {width} × {height} pixels, at any scale, got {columns} × {rows}:"
            " take both of one original"
        )
