"""Titles of pictures: fonts for any script, and lines of limited width."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress

from PIL import ImageFont

from explainers.saved.files import printable

FONTS = "DejaVuSans.ttf", "arial.ttf", "Arial Unicode.ttf", "NotoSansCJK-Regular.ttc", "msyh.ttc"
"""Fonts of Linux, Windows and macOS for titles with characters that Pillow's own font lacks."""


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


def wrapped(title: str, width: float, length: Callable[[str], float], most: int = 2) -> list[str]:
    """Wrap a title to lines of at most `width`; if there are more than `most`, it is shortened before its last word.

    Args:
        title: words; a word that is wider than a line is broken.
        width: width of a line.
        length: measures the width of a text.
        most: largest number of lines.

    >>> wrapped("a very long name 0.83", 9, len)
    ['a very', 'lon… 0.83']
    """
    text = printable(" ".join(title.split()))
    start, _, last = text.rpartition(" ")
    if not start or len(last) > 20:
        start, last = text, ""

    def lines(kept: int) -> list[str]:
        """The lines with this many characters of the start."""
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
