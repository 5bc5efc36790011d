"""Faults to plant in photos: backgrounds, a watermark, a colour cast, a border, a text; with the pixels they change.

Every fault is a function of a square photo and a generator, which draws places and words, and returns the photo with
the fault and its mask, boolean (H, W), True where the fault is. Sizes are shares of the side.
"""

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Faulty = tuple[Image.Image, NDArray[np.bool_]]
Fault = Callable[[Image.Image, random.Random], Faulty]

WORDS = ("for sale", "sold out", "new today", "best offer", "holiday", "no entry", "page two", "call us")


def crop_square(photo: Image.Image, size: int) -> Image.Image:
    """Cut the middle square out of a photo and resize it."""
    short = min(photo.size)
    left, top = (photo.width - short) // 2, (photo.height - short) // 2
    return photo.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, (left, top, left + short, top + short))


def paste_on(photo: Image.Image, background: Image.Image, generator: random.Random, width: float = 0.6) -> Faulty:
    """Shrink a photo into an ellipse with a soft edge, at a random place of another photo; the mask is the latter."""
    size = photo.width
    small = round(width * size)
    left, top = (generator.randrange(size - small + 1) for _ in range(2))
    alpha = Image.new("L", (size, size))
    ImageDraw.Draw(alpha).ellipse((left, top, left + small - 1, top + small - 1), fill=255)
    alpha = alpha.filter(ImageFilter.GaussianBlur(size / 112))
    whole = crop_square(background, size)
    front = whole.copy()
    front.paste(photo.resize((small, small), Image.Resampling.BICUBIC), (left, top))
    return Image.composite(front, whole, alpha), np.asarray(alpha) < 128


def add_watermark(photo: Image.Image, generator: random.Random) -> Faulty:
    """Put the same logo in the lower right corner: a disc and a name on a white plate, slightly transparent."""
    size = photo.width
    width, height = round(0.36 * size), round(0.16 * size)
    plate = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(plate)
    draw.ellipse((2, 2, height - 3, height - 3), fill=(200, 30, 40))
    font = ImageFont.load_default(0.36 * height)
    draw.text((height, height / 2), "PETPIX", fill=(20, 40, 120), font=font, anchor="lm")
    corner = (size - width - round(0.02 * size), size - height - round(0.02 * size))
    return _lay(photo, plate, corner, 0.85)


def add_text(photo: Image.Image, generator: random.Random) -> Faulty:
    """Write words, of several, at a random place."""
    size = photo.width
    height = round(0.14 * size)
    font = ImageFont.load_default(0.7 * height)
    words = generator.choice(WORDS)
    plate = Image.new("RGB", (round(font.getlength(words)) + height // 2, height), (250, 220, 40))
    ImageDraw.Draw(plate).text((height / 4, height / 2), words, fill="black", font=font, anchor="lm")
    corner = generator.randrange(max(size - plate.width, 1)), generator.randrange(size - height)
    return _lay(photo, plate, corner, 1.0)


def add_border(photo: Image.Image, generator: random.Random, width: float = 0.0625) -> Faulty:
    """Cover the edge with a dark frame."""
    size, edge = photo.width, round(width * photo.width)
    mask = np.ones((size, size), bool)
    mask[edge:-edge, edge:-edge] = False
    return Image.composite(Image.new("RGB", photo.size, (30, 30, 34)), photo, Image.fromarray(mask)), mask


def cast_colour(photo: Image.Image, generator: random.Random, strength: float = 0.35) -> Faulty:
    """Blend the whole photo with orange, as wrong white balance does; it has no place: the mask is the whole photo."""
    tinted = Image.blend(photo, Image.new("RGB", photo.size, (255, 140, 20)), strength)
    return tinted, np.ones((photo.height, photo.width), bool)


FAULTS: dict[str, Fault] = {
    "watermark": add_watermark,
    "colour": cast_colour,
    "border": add_border,
    "text": add_text,
}
"""The faults that need nothing but the photo; `paste_on` needs a background."""


def _lay(photo: Image.Image, plate: Image.Image, corner: tuple[int, int], opacity: float) -> Faulty:
    """Lay a plate over a photo, with its upper left corner in a place."""
    left, top = corner
    covered = photo.copy()
    covered.paste(plate, corner)
    mask = np.zeros((photo.height, photo.width), bool)
    mask[top : top + plate.height, left : left + plate.width] = True
    return Image.blend(photo, covered, opacity), mask
