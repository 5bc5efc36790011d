"""Heatmaps as colours over images: the one scale that all pictures and pages share. This needs no plotting library."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from explainers.errors import InputError, check_range
from explainers.images.transform import Box
from explainers.masking import is_constant, read_heatmaps
from explainers.saved.files import printable

STOPS = (40, 60, 255), (40, 120, 255), (60, 180, 255), (230, 40, 20), (255, 120, 0), (255, 220, 0)
"""RGB of shades from −1 to 1 at even steps: blue speaks against the explained class or text, red to yellow for it.

Colour-blind people tell the signs and the strengths apart, because both ends differ in blueness and lightness."""

OPACITY = 0.75  # of the strongest colours
PALE = 0.5  # how much of its colour the photo loses below a heatmap, so that the heatmap stands out
WHITE = 0.6  # how white the grey is where the model does not see the photo
LINE = 90  # grey of the line around the part that the model sees
GREY = (200, 200, 200)  # RGB below the colours of legends
UNSEEN = "grey: not seen by the model"
CONSTANT = "constant: no patch differs from another"
"""What pictures say of a heatmap whose patches have one value, which has no colours."""

SIZE = 640  # longer side of a panel in pixels
TEXT = (28, 30, 33)  # RGB of letters
PIXELATED = 160  # side in pixels up to which images are enlarged without interpolation: it would blur them
SATURATED = 0.03  # fraction of patches that have the full colour, so that one outlier does not make all others pale

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
        """The strength of the colour of each patch: from −1, or from 0 if unsigned, to 1; see `colour_shades`."""
        if self.constant:
            return torch.zeros(heatmap.shape)
        return ((heatmap.detach().float().cpu() - self.centre) / self.limit).clamp(-1 if self.signed else 0, 1)


def colour_scale(heatmap: Tensor, signed: bool | None = None) -> ColourScale:
    """The colours of a heatmap (rows, columns); `signed` as explainers have it, `None` asks if values are negative.

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


def colour_shades(shades: Tensor) -> Tensor:
    """RGB and opacity, from 0 to 255, of shades from −1 to 1 (...): (..., 4).

    >>> colour_shades(torch.tensor([-1.0, 0.2, 1.0])).round().tolist()
    [[40.0, 60.0, 255.0, 255.0], [230.0, 40.0, 20.0, 23.0], [255.0, 220.0, 0.0, 255.0]]
    """
    stops = torch.tensor(STOPS).float()
    at = (shades + 1) / 2 * (len(stops) - 1)
    lower = at.long().clamp(max=len(stops) - 2)
    opacity = 255 * shades.abs() ** 1.5  # weak values stay in the background
    return torch.cat([stops[lower].lerp(stops[lower + 1], (at - lower)[..., None]), opacity[..., None]], -1)


def legend_colours(signed: bool, count: int) -> list[list[int]]:
    """RGB of the scale from its lowest to its highest shade over grey, in `count` even steps."""
    *rgb, opacity = colour_shades(torch.linspace(-1 if signed else 0, 1, count)).unbind(-1)
    grey = torch.tensor(GREY).float()
    return grey.lerp(torch.stack(rgb, -1), OPACITY * opacity[:, None] / 255).round().int().tolist()


def ends(signed: bool, explained: str = "the class", against: str = "") -> tuple[str, ...]:
    """What the scale says, from its lowest to its highest value, of a class or its contrast with another one.

    >>> ends(True, "zebra")
    ('speaks against zebra', 'no effect', 'speaks for zebra')
    """
    words = (
        f"speaks for {against}" if against else f"speaks against {explained}",
        "no effect",
        f"speaks for {explained}",
    )
    return words if signed else (f"less important for {explained}", "more important")


def overlay(
    image: Tensor | np.ndarray | Image.Image,
    heatmap: Tensor | np.ndarray,
    opacity: float = OPACITY,
    smooth: bool = True,
    signed: bool | None = None,
    box: Box | None = None,
) -> Tensor:
    """Lay a heatmap over an image, in colours that become stronger with its values.

    A signed heatmap is red to yellow above 0 and blue below; the strongest values of both signs share one scale. An
    unsigned one has no colour at its lowest values. A constant one has no colours. See `fade` for the image below.

    Args:
        image: uint8, (3, H, W) or (H, W, 3), or a PIL image.
        heatmap: (rows, columns); higher is more important.
        opacity: opacity of the strongest colours, from 0 to 1.
        smooth: interpolate bicubically between the centres of patches; otherwise patches have sharp edges.
        signed: whether values below 0 oppose what is explained, as the attribute `signed` of the explainer says; `None`
            for whether there are any.
        box: where in the image the heatmap is, in pixels; `None` for all of it.

    Returns:
        uint8, (3, H, W).

    Raises:
        InputError: unless both are of one image, and for NaN.

    >>> image = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    >>> overlay(image, torch.tensor([[0.0, 0.0], [0.0, 1.0]]), opacity=1, smooth=False, signed=True)[:, 1].tolist()
    [[100, 255], [100, 220], [100, 0]]
    """
    image, heatmap = _read_image(image), read_heatmaps(heatmap, "heatmap=")
    _check_drawn(image, heatmap, opacity)
    left, top, right, bottom = _round_box(image, box)
    shades = enlarge_shades(colour_scale(heatmap, signed).shades(heatmap), (bottom - top, right - left), smooth)
    colours = colour_shades(shades[max(-top, 0) :, max(-left, 0) :]).permute(2, 0, 1)
    drawn = fade(image, box).float()
    below = drawn[:, max(top, 0) : bottom, max(left, 0) : right]
    colours = colours[:, : below.shape[1], : below.shape[2]]
    below.lerp_(colours[:3], opacity * colours[3] / 255)
    return drawn.round().to(torch.uint8)


def fade(image: Tensor, box: Box | None = None, pale: float = PALE) -> Tensor:
    """Prepare an image (3, H, W) for a heatmap: paler colours in its `box`, light grey and a thin line around it."""
    pixels = image.cpu().float()
    grey = pixels.mean(0).expand_as(pixels)
    left, top, right, bottom = _round_box(image, box)
    faded = grey.lerp(torch.tensor(255.0), WHITE)
    line = max(1, max(pixels.shape) // 300)
    faded[:, max(top - line, 0) : bottom + line, max(left - line, 0) : right + line] = LINE
    inside = slice(None), slice(max(top, 0), bottom), slice(max(left, 0), right)
    faded[inside] = pixels[inside].lerp(grey[inside], pale)
    return faded.round().to(torch.uint8)


def enlarge_shades(shades: Tensor, size: tuple[int, int], smooth: bool) -> Tensor:
    """Enlarge shades (rows, columns) to a `size` (H, W), bicubically or with sharp patches."""
    kind = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    enlarged = torch.from_numpy(np.array(Image.fromarray(shades.numpy()).resize(size[::-1], kind)))
    return enlarged.clamp(*shades.aminmax())  # bicubic curves swing beyond


def _round_box(image: Tensor, box: Box | None) -> tuple[int, int, int, int]:
    """A box in an image (3, H, W) in whole pixels, at least one in each direction; `None` for the whole image."""
    height, width = image.shape[1:]
    left, top, right, bottom = (0, 0, width, height) if box is None else map(round, box)
    left, top = min(left, width - 1), min(top, height - 1)  # the crop of a thin photo may lie between two pixels
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _read_image(image: Tensor | np.ndarray | Image.Image) -> Tensor:
    """An image as people hold it as a tensor, (3, H, W) if it has three channels."""
    if isinstance(image, Image.Image):
        return to_tensor(image.convert("RGB"))
    pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    last = pixels.dim() == 3 and pixels.shape[0] != 3 and pixels.shape[2] == 3
    return pixels.permute(2, 0, 1) if last else pixels


def _check_drawn(image: Tensor, heatmap: Tensor, opacity: float) -> None:
    """Raise an InputError unless image and heatmap can be drawn with this opacity."""
    check_range(0, 1, opacity=opacity)
    if image.dim() != 3 or len(image) != 3 or image.dtype != torch.uint8 or heatmap.dim() != 2:
        raise InputError(
            f"expected one uint8 image (3, H, W) and one heatmap (rows, columns), got {image.dtype} {list(image.shape)}"
            f" and {list(heatmap.shape)}: take one of a batch, as in overlay(images[0], heatmaps[0])"
        )
    if not heatmap.isfinite().all():
        raise InputError("expected a finite heatmap, got NaN or infinity: it has no colours")


def draw_on_photo(
    photo: Image.Image,
    heatmap: Tensor,
    box: Box | None = None,
    size: int = SIZE,
    smooth: bool = True,
    signed: bool | None = None,
) -> Image.Image:
    """Draw the `overlay` of a heatmap over a photo whose longer side gets `size` pixels, from 192 to 8192.

    `box` is in pixels of the photo as it is; where the photo is outside of it, it is grey.
    """
    check_range(192, 8192, size=size)
    small = fit_photo(photo, size)
    placed = box and scale_box(box, photo, small)
    return to_pillow(overlay(to_tensor(small), heatmap, OPACITY, smooth, signed, placed))


def draw_annotated(
    photo: Image.Image,
    heatmap: Tensor,
    title: str,
    explained: str,
    method: str,
    box: Box | None = None,
    size: int = SIZE,
    smooth: bool = True,
    signed: bool | None = None,
    against: str = "",
) -> Image.Image:
    """Draw a photo, and beside it the heatmap over the photo, below a title and above a legend of the colours.

    A picture of a constant heatmap says so below the title, and has no legend. Wide photos stand above one another.

    Args:
        photo: upright RGB.
        heatmap: (rows, columns); higher is more important.
        title: such as the class and its probability; a long one is wrapped to two lines and shortened in the middle.
            Characters that no font of the machine has become boxes.
        explained: the class or text, for the legend.
        method: what computed the heatmap, in small letters below the title.
        box: where in the photo the heatmap is, see `draw_on_photo`, as for `size` and `smooth`.
        signed: see `overlay`.
        against: the one class or text from which it is told apart, for the legend.

    >>> draw_annotated(Image.new("RGB", (32, 32)), torch.eye(4), "tabby 0.83", "tabby", "GAE", size=320).size
    (676, 438)
    """
    scale = colour_scale(heatmap, signed)
    drawn = draw_on_photo(photo, heatmap, box, size, smooth, scale.signed)
    gap, stacked = size // 32, drawn.width > 2 * drawn.height
    along, down = (0, drawn.height + gap) if stacked else (drawn.width + gap, 0)
    width, height = max(drawn.width + along, size), drawn.height + down
    what = "what speaks for and against it" if scale.signed else "what is important for it"
    unseen = "" if box is None or sees_all(photo, box) else f"; {UNSEEN}"
    lines = [f"{what}, by {method}{unseen}", CONSTANT if scale.constant else ""]
    canvas, draw, margin, top = titled_canvas(width, height, title, lines, not scale.constant)
    left = margin + (width - drawn.width - along) // 2
    canvas.paste(fit_photo(photo, size), (left, top))
    canvas.paste(drawn, (left + along, top + down))
    if not scale.constant:
        words = ends(scale.signed, explained, against)
        draw_legend(draw, (margin, top + height + margin), width, scale.signed, words)
    return canvas


def titled_canvas(
    width: int, height: int, title: str, subtitles: Sequence[str], legend: bool = True
) -> tuple[Image.Image, ImageDraw.ImageDraw, int, int]:
    """A white canvas with a title of two lines at most, and smaller lines of each subtitle that is not empty.

    Letters follow the width, in pixels. Returns the canvas, what draws on it, its margin, and the top of the picture.
    """
    margin, lines = width // 48, []
    small = [(subtitle, width / 42, width // 32) for subtitle in subtitles]
    for text, size, step in [(title, width / 28, width // 22), *small]:
        font = font_for(text, size)
        lines += [(line, font, step) for line in wrap_title(text, width, font.getlength)]
    top = margin + sum(step for *_, step in lines)
    below = width // 15 if legend else 0
    canvas = Image.new("RGB", (width + 2 * margin, top + height + margin + below), "white")
    draw = ImageDraw.Draw(canvas)
    at = margin // 2
    for line, font, step in lines:
        draw.text((margin, at), line, TEXT, font)
        at += step
    return canvas, draw, margin, top


def fit_photo(photo: Image.Image, size: int) -> Image.Image:
    """Resize a photo so that its longer side has `size` pixels."""
    longer = max(photo.size)
    width, height = (max(1, round(side * size / longer)) for side in photo.size)
    kind = Image.Resampling.NEAREST if longer <= PIXELATED else Image.Resampling.BICUBIC
    return photo.resize((width, height), kind, reducing_gap=2)


def sees_all(photo: Image.Image, box: Box) -> bool:
    """Whether a box holds the whole photo, up to half a pixel."""
    return max(box[:2]) <= 0.5 and box[2] >= photo.width - 0.5 and box[3] >= photo.height - 0.5


def scale_box(box: Box, photo: Image.Image, small: Image.Image) -> Box:
    """The same box of a photo in another size of it.

    >>> scale_box((0, 10, 20, 30), Image.new("RGB", (40, 60)), Image.new("RGB", (80, 30)))
    (0.0, 5.0, 40.0, 15.0)
    """
    across, down = small.width / photo.width, small.height / photo.height
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def to_tensor(photo: Image.Image) -> Tensor:
    """An RGB picture as a uint8 image (3, H, W)."""
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1)


def to_pillow(image: Tensor) -> Image.Image:
    """A uint8 image (3, H, W) as a picture."""
    return Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy())


def draw_legend(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], width: int, signed: bool, words: Sequence[str]
) -> None:
    """Draw a bar of the colours from the lowest value to the highest, and below it two or three words.

    Words that are too long are shortened.
    """
    left, top = corner
    height = width // 60
    for column, colour in enumerate(legend_colours(signed, width)):
        draw.line([(left + column, top), (left + column, top + height)], tuple(colour))
    places = (("la", 0), ("ma", 0.5), ("ra", 1)) if len(words) == 3 else (("la", 0), ("ra", 1))
    for text, (anchor, share) in zip(words, places, strict=True):
        font = font_for(text, width / 42)
        (line,) = wrap_title(text, 0.42 * width, font.getlength, 1)
        draw.text((left + share * width, top + 1.4 * height), line, TEXT, font, anchor)


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
