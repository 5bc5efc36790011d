"""Heatmaps as colours over images: red supports the class, blue opposes it. This needs no plotting library."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_range
from explainers.report.titles import font_for, wrapped

RED, BLUE = (220, 20, 40), (20, 60, 220)
"""RGB of the highest and the lowest values."""

GREY = (140, 140, 140)
"""RGB of the median in legends; in overlays the median has the grey of the image."""

ENDS = "opposes the class", "median", "supports it"
"""What the lowest value, the median and the highest value mean."""

TEXT = (28, 30, 33)
"""RGB of letters."""

PIXELATED = 160
"""Side in pixels up to which images are enlarged without interpolation: it would blur them."""

SATURATED = 0.05
"""Fraction of patches that have the full colour, so that one outlier does not make all others pale."""


def colour_scale(heatmap: Tensor) -> tuple[float, float]:
    """The median of a heatmap (P, P), which has no colour, and the distance from it that has the full colour.

    >>> colour_scale(torch.tensor([[1.0, 2.0], [3.0, 100.0]]))
    (2.0, 98.0)
    """
    heatmap = heatmap.detach().float().cpu()
    distances = (heatmap - heatmap.median()).abs()
    limit = distances.quantile(1 - SATURATED, interpolation="higher")
    return heatmap.median().item(), limit.item() or distances.max().item() or 1.0


def shades(heatmap: Tensor) -> Tensor:
    """A heatmap (P, P) relative to its `colour_scale`: from −1, the full blue, to 1, the full red."""
    centre, limit = colour_scale(heatmap)
    return ((heatmap.detach().float().cpu() - centre) / limit).clamp(-1, 1)


def overlay(image: Tensor, heatmap: Tensor, opacity: float = 0.8, smooth: bool = False) -> Tensor:
    """Lay a heatmap over the grey image: the farther a patch is from the median, the stronger its red or blue.

    Args:
        image: uint8, (3, H, W).
        heatmap: (P, P); higher is more important.
        opacity: opacity of the strongest colours, from 0 to 1.
        smooth: interpolate bilinearly between the centres of patches; otherwise patches have sharp edges.

    Returns:
        uint8, (3, H, W).

    Raises:
        InputError: unless both are of one image, and for NaN.

    >>> image = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    >>> overlay(image, torch.tensor([[0.0, 0.0], [0.0, 1.0]]), opacity=1)[:, 1].tolist()
    [[100, 220], [100, 20], [100, 40]]
    """
    check_drawn(image, heatmap, opacity)
    mode = "bilinear" if smooth else "nearest"
    values = F.interpolate(shades(heatmap)[None, None], image.shape[-2:], mode=mode)[0]  # (1, H, W)
    grey = image.cpu().float().mean(0, keepdim=True)
    red, blue = (torch.tensor(colour).view(3, 1, 1) for colour in (RED, BLUE))
    strength = opacity * values.abs()
    return (grey + strength * (torch.where(values > 0, red, blue) - grey)).round().to(torch.uint8)


def check_drawn(image: Tensor, heatmap: Tensor, opacity: float) -> None:
    """Raise an InputError unless image and heatmap can be drawn with this opacity."""
    check_range(0, 1, opacity=opacity)
    if image.dim() != 3 or len(image) != 3 or image.dtype != torch.uint8 or heatmap.dim() != 2:
        raise InputError(
            f"expected one uint8 image (3, H, W) and one heatmap (P, P), got {image.dtype} {list(image.shape)} and"
            f" {list(heatmap.shape)}: take one of a batch, as in overlay(images[0], heatmaps[0])"
        )
    if not heatmap.isfinite().all():
        raise InputError("expected a finite heatmap, got NaN or infinity: it has no colours")


def annotated(
    image: Tensor,
    heatmap: Tensor,
    title: str,
    opacity: float = 0.8,
    smooth: bool = False,
    size: int | None = None,
    legend: bool = True,
    explained: str = "class",
) -> Image.Image:
    """Draw the `overlay` of an image large, below a title and above a legend of its colours.

    Args:
        image: uint8, (3, H, W).
        heatmap: (P, P); higher is more important.
        title: such as the class and its probability; a long one is wrapped to two lines and shortened in the middle.
            Characters that no font of the machine has become boxes.
        opacity: opacity of the strongest colours, from 0 to 1.
        smooth: interpolate bilinearly between the centres of patches; otherwise patches have sharp edges.
        size: longer side of the overlay in pixels, from 192 to 8192; by default that of the image, and at least 448.
        legend: whether to draw the legend.
        explained: what the legend says that patches oppose: the class, or such as the `text`.

    Raises:
        InputError: for what `overlay` refuses, and for other sizes.

    >>> image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    >>> annotated(image, torch.eye(4), "tabby 0.83", size=320, legend=False).size
    (340, 360)
    """
    check_drawn(image, heatmap, opacity)
    side = max(448, *image.shape[1:]) if size is None else size
    check_range(192, 8192, size=side)
    picture = pillow(overlay(resized(image, side), heatmap, opacity, smooth))
    width, margin, step = max(picture.width, 192), side // 32, side // 16
    font = font_for(title, side / 20)
    lines = wrapped(title, width, font.getlength)
    top = margin + len(lines) * step
    below = side // 10 if legend else 0
    canvas = Image.new("RGB", (width + 2 * margin, top + picture.height + margin + below), "white")
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(lines):
        draw.text((margin, margin // 2 + number * step), line, TEXT, font)
    canvas.paste(picture, (margin + (width - picture.width) // 2, top))
    if legend:
        draw_legend(draw, (margin, top + picture.height + margin), width, (f"opposes the {explained}", *ENDS[1:]))
    return canvas


def resized(image: Tensor, side: int) -> Tensor:
    """Resize an image (3, H, W) so that its longer side has `side` pixels."""
    height, width = image.shape[1:]
    longer = max(height, width)
    size = max(1, round(width * side / longer)), max(1, round(height * side / longer))
    kind = Image.Resampling.NEAREST if longer <= PIXELATED else Image.Resampling.BICUBIC
    return torch.from_numpy(np.array(pillow(image).resize(size, kind))).permute(2, 0, 1)


def pillow(image: Tensor) -> Image.Image:
    """A uint8 image (3, H, W) as a picture."""
    return Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy())


def draw_legend(draw: ImageDraw.ImageDraw, corner: tuple[int, int], width: int, ends: Sequence[str]) -> None:
    """Draw a bar from the colour of the lowest value to that of the highest, and below it the `ends`."""
    left, top = corner
    height = width // 40
    for column in range(width):
        value = 2 * column / max(1, width - 1) - 1
        end = RED if value > 0 else BLUE
        colour = tuple(round(grey + abs(value) * (full - grey)) for grey, full in zip(GREY, end, strict=True))
        draw.line([(left + column, top), (left + column, top + height)], colour)
    font = ImageFont.load_default(max(9, width / 28))
    for text, anchor, share in zip(ends, ("la", "ma", "ra"), (0, 0.5, 1), strict=True):
        draw.text((left + share * width, top + 1.4 * height), text, TEXT, font, anchor)
