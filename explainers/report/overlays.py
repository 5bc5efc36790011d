"""Heatmaps as colours over images: the one scale that all pictures and pages share. This needs no plotting library."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_range
from explainers.saved.files import printable

RED, BLUE = (220, 20, 40), (20, 60, 220)  # RGB of the highest and the lowest values of signed heatmaps
SEQUENTIAL = (33, 145, 140), (94, 201, 98), (253, 231, 37)
"""RGB of unsigned heatmaps, from the low to the high values: the upper half of viridis."""

GREY = (140, 140, 140)  # RGB of the values without colour in legends; in overlays they have the grey of the image
IMPORTANCE = "less important", "more important"  # what the ends of the scale of an unsigned heatmap mean
CONSTANT = "constant: no patch differs from another"
"""What pictures say of a heatmap whose patches have one value, which has no colours."""

TEXT = (28, 30, 33)  # RGB of letters
PIXELATED = 160  # side in pixels up to which images are enlarged without interpolation: it would blur them
SATURATED = 0.05  # fraction of patches that have the full colour, so that one outlier does not make all others pale
ROUNDING = 1e-6
"""Largest standard deviation of a heatmap that is called constant, relative to its largest absolute value."""


FONTS = "DejaVuSans.ttf", "arial.ttf", "Arial Unicode.ttf", "NotoSansCJK-Regular.ttc", "msyh.ttc"
"""Fonts of Linux, Windows and macOS for titles with characters that Pillow's own font lacks."""


@dataclass(frozen=True)
class ColourScale:
    """How the values of a heatmap become colours."""

    centre: float  # the value without colour: 0 of a signed heatmap, a low value of an unsigned one
    limit: float  # the distance from it that has the full colour; 0 for a constant heatmap, which has no colours
    signed: bool  # whether values below and above the centre have colours of their own

    @property
    def constant(self) -> bool:
        """Whether all patches have the same value."""
        return self.limit == 0

    def shades(self, heatmap: Tensor) -> Tensor:
        """The strength of the colour of each patch: from −1, the full blue, or from 0 if unsigned, to 1."""
        if self.constant:
            return torch.zeros(heatmap.shape)
        return ((heatmap.detach().float().cpu() - self.centre) / self.limit).clamp(-1 if self.signed else 0, 1)


def is_constant(heatmaps: Tensor) -> Tensor:
    """Whether all patches of each heatmap (B, P, P) have the same value, but for rounding: boolean (B,)."""
    flat = heatmaps.flatten(1)
    return flat.std(1, correction=0) <= ROUNDING * flat.abs().amax(1)


def colour_scale(heatmap: Tensor, signed: bool | None = None) -> ColourScale:
    """The colours of a heatmap (P, P); `signed` as explainers have it, `None` asks whether there are negative values.

    >>> colour_scale(torch.tensor([[-1.0, 2.0], [3.0, 100.0]]))
    ColourScale(centre=0.0, limit=100.0, signed=True)
    >>> colour_scale(torch.tensor([[1.0, 2.0], [3.0, 100.0]]))
    ColourScale(centre=1.0, limit=99.0, signed=False)
    """
    values = heatmap.detach().float().cpu()
    low, high = (end.item() for end in values.aminmax())
    signed = low < 0 if signed is None else signed
    if is_constant(values[None]).item():
        return ColourScale(0.0, 0.0, signed)
    lowest = values.quantile(SATURATED, interpolation="lower").item()
    centre = 0.0 if signed else low if lowest == high else lowest
    distances = (values - centre).abs()
    limit = distances.quantile(1 - SATURATED, interpolation="higher")
    return ColourScale(centre, limit.item() or distances.max().item(), signed)


def colour_shades(shades: Tensor, signed: bool) -> Tensor:
    """The colours of `ColourScale.shades` (...) at full opacity, RGB from 0 to 255: (..., 3)."""
    if signed:
        return torch.where(shades[..., None] > 0, torch.tensor(RED), torch.tensor(BLUE)).float()
    stops = torch.tensor(SEQUENTIAL).float()
    at = shades * (len(stops) - 1)
    lower = at.long().clamp(max=len(stops) - 2)
    return stops[lower].lerp(stops[lower + 1], (at - lower)[..., None])


def legend_colours(signed: bool, count: int) -> list[list[int]]:
    """RGB of the scale from its lowest to its highest shade, in `count` even steps."""
    shades = torch.linspace(-1 if signed else 0, 1, count)
    grey = torch.tensor(GREY).float()
    return grey.lerp(colour_shades(shades, signed), shades.abs()[:, None]).round().int().tolist()


def ends(signed: bool, explained: str = "class") -> tuple[str, ...]:
    """What the scale says, from its lowest to its highest value, when a `class` or a `text` is explained."""
    return (f"opposes the {explained}", "0", "supports it") if signed else IMPORTANCE


def overlay(
    image: Tensor, heatmap: Tensor, opacity: float = 0.8, smooth: bool = False, signed: bool | None = None
) -> Tensor:
    """Lay a heatmap over the grey image, in colours that become stronger with its values.

    A signed heatmap is red above 0 and blue below; the strongest values of both signs share one scale. An unsigned one
    has no colour at its lowest values, and turns over green to yellow. A constant one has no colours.

    Args:
        image: uint8, (3, H, W).
        heatmap: (P, P); higher is more important.
        opacity: opacity of the strongest colours, from 0 to 1.
        smooth: interpolate bilinearly between the centres of patches; otherwise patches have sharp edges.
        signed: whether values below 0 oppose what is explained, as the attribute `signed` of the explainer says; `None`
            for whether there are any.

    Returns:
        uint8, (3, H, W).

    Raises:
        InputError: unless both are of one image, and for NaN.

    >>> image = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    >>> overlay(image, torch.tensor([[0.0, 0.0], [0.0, 1.0]]), opacity=1, signed=True)[:, 1].tolist()
    [[100, 220], [100, 20], [100, 40]]
    """
    check_drawn(image, heatmap, opacity)
    scale = colour_scale(heatmap, signed)
    mode = "bilinear" if smooth else "nearest"
    shades = F.interpolate(scale.shades(heatmap)[None, None], image.shape[-2:], mode=mode)[0, 0]  # (H, W)
    grey = image.cpu().float().mean(0)[..., None]
    strength = opacity * shades.abs()[..., None]
    return grey.lerp(colour_shades(shades, scale.signed), strength).round().to(torch.uint8).permute(2, 0, 1)


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


def draw_annotated(
    image: Tensor,
    heatmap: Tensor,
    title: str,
    opacity: float = 0.8,
    smooth: bool = False,
    size: int | None = None,
    legend: bool = True,
    explained: str = "class",
    method: str = "",
    signed: bool | None = None,
) -> Image.Image:
    """Draw the `overlay` of an image large, below a title and above a legend of its colours.

    A picture of a constant heatmap says so below the title, and has no legend.

    Args:
        image: uint8, (3, H, W).
        heatmap: (P, P); higher is more important.
        title: such as the class and its probability; a long one is wrapped to two lines and shortened in the middle.
            Characters that no font of the machine has become boxes.
        opacity: see `overlay`, as for `smooth` and `signed`.
        size: longer side of the overlay in pixels, from 192 to 8192; by default that of the image, and at least 448.
        legend: whether to draw the legend.
        explained: what the legend says that patches oppose: the class, or such as the `text`.
        method: what computed the heatmap, in small letters below the title.

    >>> image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    >>> draw_annotated(image, torch.eye(4), "tabby 0.83", size=320, legend=False).size
    (340, 360)
    """
    check_drawn(image, heatmap, opacity)
    side = max(448, *image.shape[1:]) if size is None else size
    check_range(192, 8192, size=side)
    scale = colour_scale(heatmap, signed)
    picture = to_pillow(overlay(resize_image(image, side), heatmap, opacity, smooth, scale.signed))
    width = max(picture.width, 192)
    legend = legend and not scale.constant
    subtitles = [method, CONSTANT if scale.constant else ""]
    canvas, draw, margin, top = titled_canvas(width, picture.height, side, title, subtitles, legend)
    canvas.paste(picture, (margin + (width - picture.width) // 2, top))
    if legend:
        corner = margin, top + picture.height + margin
        draw_legend(draw, corner, width, scale.signed, ends(scale.signed, explained))
    return canvas


def titled_canvas(
    width: int, height: int, side: int, title: str, subtitles: Sequence[str], legend: bool
) -> tuple[Image.Image, ImageDraw.ImageDraw, int, int]:
    """A white canvas with a title of two lines at most, and a smaller line of each subtitle that is not empty.

    Letters follow `side`, in pixels. Returns the canvas, what draws on it, its margin, and the top of the picture.
    """
    margin, lines = side // 32, []
    small = [(subtitle, side / 28, side // 20, 1) for subtitle in subtitles]
    for text, size, step, most in [(title, side / 20, side // 16, 2), *small]:
        font = font_for(text, size)
        lines += [(line, font, step) for line in wrap_title(text, width, font.getlength, most)]
    top = margin + sum(step for *_, step in lines)
    below = side // 10 if legend else 0
    canvas = Image.new("RGB", (width + 2 * margin, top + height + margin + below), "white")
    draw = ImageDraw.Draw(canvas)
    at = margin // 2
    for line, font, step in lines:
        draw.text((margin, at), line, TEXT, font)
        at += step
    return canvas, draw, margin, top


def resize_image(image: Tensor, side: int) -> Tensor:
    """Resize an image (3, H, W) so that its longer side has `side` pixels."""
    height, width = image.shape[1:]
    longer = max(height, width)
    size = max(1, round(width * side / longer)), max(1, round(height * side / longer))
    kind = Image.Resampling.NEAREST if longer <= PIXELATED else Image.Resampling.BICUBIC
    return torch.from_numpy(np.array(to_pillow(image).resize(size, kind))).permute(2, 0, 1)


def to_pillow(image: Tensor) -> Image.Image:
    """A uint8 image (3, H, W) as a picture."""
    return Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy())


def draw_legend(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], width: int, signed: bool, words: Sequence[str]
) -> None:
    """Draw a bar from the colour of the lowest value to that of the highest, and below it two or three words."""
    left, top = corner
    height = width // 40
    for column, colour in enumerate(legend_colours(signed, width)):
        draw.line([(left + column, top), (left + column, top + height)], tuple(colour))
    font = ImageFont.load_default(max(9, width / 28))
    places = (("la", 0), ("ma", 0.5), ("ra", 1)) if len(words) == 3 else (("la", 0), ("ra", 1))
    for text, (anchor, share) in zip(words, places, strict=True):
        draw.text((left + share * width, top + 1.4 * height), text, TEXT, font, anchor)


def font_for(text: str, size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font if it has all characters, otherwise the font of the machine that lacks the fewest."""
    fonts = [ImageFont.load_default(size)]
    for name in () if text.isascii() else FONTS:
        with suppress(OSError):  # this machine does not have it
            fonts.append(ImageFont.truetype(name, size))
    return min(fonts, key=lambda font: _missing(text, font))


def _missing(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    """The number of characters for which a font draws a box."""
    box = bytes(font.getmask("\uffff"))
    return sum(bytes(font.getmask(each)) == box for each in set(text))


def wrap_title(title: str, width: float, length: Callable[[str], float], most: int = 2) -> list[str]:
    """Wrap a title to `most` lines of at most `width`, as `length` measures it; it is shortened before its last word.

    >>> wrap_title("a very long name 0.83", 9, len)
    ['a very', 'lon… 0.83']
    """
    text = printable(" ".join(title.split()))
    start, _, last = text.rpartition(" ")
    if not start or len(last) > 20:
        start, last = text, ""

    def lines(kept: int) -> list[str]:  # with this many characters of the start
        shortened = f"{start[:kept].rstrip()}… {last}".rstrip()
        return _lines(text if kept == len(start) else shortened, width, length)

    too_many = bisect_left(range(1, len(start) + 1), True, key=lambda kept: len(lines(kept)) > most)
    return lines(too_many)[:most]


def _lines(text: str, width: float, length: Callable[[str], float]) -> list[str]:
    lines = []
    while text:
        fitting = max(1, bisect_right(range(1, len(text) + 1), width, key=lambda end: length(text[:end])))
        space = text.rfind(" ", 0, fitting + 1)
        end = fitting if fitting == len(text) or space <= 0 else space
        lines.append(text[:end])
        text = text[end:].lstrip()
    return lines
