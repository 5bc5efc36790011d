"""Reads what transforms of torchvision and image processors of transformers do with photos."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from explainers.errors import InputError
from explainers.images.transform import ImageTransform, Resize

WARPED = 384
"""Side from which on ConvNeXT's processor, which has a crop_pct and no crop, squashes photos."""

CONVNEXT = "convnext", "convnextv2", "resnet"
"""Folders of models with that processor."""

SQUASHED = ImageTransform(resize="squash", rounds=False)
CROPPED = ImageTransform(rounds=False)
TRANSFORMS = {
    **dict.fromkeys(("vit", "beit", "dinov3_vit"), replace(SQUASHED, interpolation="bilinear")),
    **dict.fromkeys(("swin", "siglip", "siglip2"), SQUASHED),
    **dict.fromkeys(("dinov2", "dinov2_with_registers", "hiera"), replace(CROPPED, crop_pct=0.875)),
    **dict.fromkeys(CONVNEXT, replace(CROPPED, crop_pct=0.875)),
    "deit": replace(SQUASHED, crop_pct=0.875),
    "clip": CROPPED,
}
"""Folder of a model in transformers → what its usual image processor does with photos; most squash."""


def guess_transform(family: str, size: tuple[int, int]) -> ImageTransform:
    """Return what the usual image processor of a folder of transformers does with photos at a height and width."""
    warps = family in CONVNEXT and min(size) >= WARPED
    return replace(SQUASHED if warps else TRANSFORMS.get(family, SQUASHED), size=size)


@dataclass(frozen=True)
class Preprocessing:
    """How a library prepares photos for a model: the transform, and mean and deviation of pixels from 0 to 1."""

    transform: ImageTransform
    mean: Sequence[float]
    std: Sequence[float]


def read_processor(processor: Any) -> Preprocessing:
    """Read an image processor of transformers, or a preset of torchvision, which `weights.transforms()` returns.

    Both resize as Pillow does; the torchvision backend of transformers differs from it by rounding.

    Raises:
        InputError: for another object, or a processor that does what an `ImageTransform` cannot, such as to resize the
            long side.
    """
    if type(processor).__name__ == "ImageClassification":
        (crop,), (resized,) = processor.crop_size, processor.resize_size
        transform = ImageTransform((crop, crop), "center", crop / resized, processor.interpolation.value)
        return Preprocessing(transform, processor.mean, processor.std)
    if not hasattr(processor, "to_dict") or "size" not in (fields := processor.to_dict()):
        raise InputError(
            "processor= needs an image processor of transformers, or the weights.transforms() of a classifier of"
            f" torchvision, got {type(processor).__name__}"
        )
    offset = float(fields.get("rescale_offset") or False)
    scale = 255 * fields.get("rescale_factor", 1 / 255)
    normalises = fields.get("do_normalize", True)
    means, stds = (processor.image_mean, processor.image_std) if normalises else ((0.0,) * 3, (1.0,) * 3)
    if fields.get("include_top"):  # of EfficientNet, whose processor divides twice
        stds = [each**2 for each in stds]
    mean, std = [(each + offset) / scale for each in means], [each / scale for each in stds]
    return Preprocessing(_read_resize(type(processor).__name__, fields), mean, std)


def _read_resize(name: str, fields: Mapping[str, Any]) -> ImageTransform:
    """Read the resize of the fields of a processor whose class is called `name`."""
    size, crop_pct, crops = fields["size"], fields.get("crop_pct"), fields.get("do_center_crop")
    resize: Resize = "center" if "shortest_edge" in size else "squash"
    edge = size.get("shortest_edge")
    resized: tuple[Any, Any] = (edge, edge) if edge else (size.get("height"), size.get("width"))
    if name.startswith("Levit"):
        resized = (int(256 / 224 * edge),) * 2  # its processor does this, whatever the size is
    seen = _sides(fields["crop_size"]) if crops else resized
    if crop_pct and (crops or edge < WARPED):
        resized = (int(edge / crop_pct),) * 2
    elif crop_pct:
        resize = "squash"
    fraction = seen[0] / resized[0] if all(resized) else 0
    even = bool(fraction) and abs(seen[1] / resized[1] - fraction) < 1e-3
    if fields.get("do_flip_channel_order"):
        raise InputError(
            f"processor= needs one that keeps the order of channels, got {name}, whose model takes BGR: leave it out,"
            " wrap the model in a module whose forward is model(images.flip(1)), and give mean, std and image_size"
        )
    others = fields.get("do_pad") or "longest_edge" in size
    if not fields.get("do_resize", True) or others or fraction > 1 or not even:
        raise InputError(
            "processor= needs one that resizes photos to a height and width or their short side, and pads none,"
            f" got {name} with size {dict(size)}"
        )
    interpolation = Image.Resampling(int(fields["resample"])).name.lower()
    return ImageTransform(seen, resize, fraction, interpolation, rounds=False)


def _sides(size: Mapping[str, int]) -> tuple[int, int]:
    """Return the height and width of a crop."""
    edge = size.get("shortest_edge")
    return (edge, edge) if edge else (size["height"], size["width"])
