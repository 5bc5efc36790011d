"""The grid of a model: the size of its images and of its patches."""

from typing import Any

import timm.data

from explainers.errors import InputError
from explainers.masking import PatchGrid

OTHERWISE = 16
"""Side of a patch in pixels where a model has no patches of its own: CNNs, and Swin, whose maps have several sizes."""


def own_patch_size(backbone: Any) -> int | None:
    """Return the side of a model's patches in pixels; None if its maps have several sizes, as in CNNs and Swin."""
    sizes = {level.get("reduction") for level in getattr(backbone, "feature_info", [])} - {None}
    return sizes.pop() if len(sizes) == 1 else None


def own_grid(backbone: Any) -> PatchGrid:
    """Return the grid that follows from a timm model.

    A model without patches of its own has patches of 16 pixels. If it takes images of any size, its images are the
    largest ones up to the size of its training that these patches cover.

    Raises:
        InputError: if the images are not square, or do not consist of the model's patches.

    >>> import timm
    >>> own_grid(timm.create_model("test_vit")), own_grid(timm.create_model("test_resnet")).side
    (PatchGrid(image_size=160, patch_size=16, differs=False), 10)
    """
    embed = getattr(backbone, "patch_embed", None)
    height, width = getattr(embed, "img_size", None) or timm.data.resolve_model_data_config(backbone)["input_size"][1:]
    if height != width:
        raise InputError(
            f"expected a model of square images, got one of {height} × {width} pixels: set"
            f" ++target.model.img_size={min(height, width)}"
        )
    own = own_patch_size(backbone)
    otherwise: int = getattr(backbone, "default_patch_size", OTHERWISE)
    patch = own or otherwise
    covered = height - height % patch
    if covered != height and (own or getattr(embed, "strict_img_size", False)):
        raise InputError(
            f"expected a model whose images consist of patches of {patch} pixels, got images of {height} × {height}:"
            f" set ++target.model.img_size={covered}"
        )
    return PatchGrid(covered, patch)


def check_grid(backbone: Any, name: str, grid: PatchGrid) -> None:
    """Raise an InputError unless a grid has the image and patch size of a model, or allows others by `differs`.

    Args:
        backbone: a timm model. CNNs and Swin accept patches of any size.
        name: its name, for messages.
        grid: the grid to check.
    """
    embed, side = getattr(backbone, "patch_embed", None), grid.image_size
    images = getattr(embed, "img_size", None) if getattr(embed, "strict_img_size", False) else None
    if images is not None and images != (side, side):
        raise InputError(
            f"expected a grid of images of {images[0]} × {images[1]} pixels, as {name} takes, got {side} × {side}: set"
            f" grid.image_size={images[0]}, or ++target.model.img_size={side}"
        )
    own = own_patch_size(backbone)
    if own not in (None, grid.patch_size) and not grid.differs:
        raise InputError(
            f"expected a grid of patches of {own} pixels, as {name} has, got {grid.patch_size}: set"
            f" grid.patch_size={own}, or ++grid.differs=true (PatchGrid(..., differs=True)) to allow another"
        )
