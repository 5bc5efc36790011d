"""Two images side by side, with what makes them alike: heatmaps, and the pairs of patches that match best."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from explainers.report.overlays import SIZE, draw_legend, draw_on_photo, titled_canvas, to_pillow

LIKENESS = "unlike the other", "0", "like the other"  # what the lowest value, 0 and the highest value mean
MARKS = (250, 204, 21), (34, 197, 94), (6, 182, 212), (249, 115, 22), (232, 121, 249)
"""RGB of the pairs of patches, in their order; from the sixth pair on they repeat."""

BLACK = (0, 0, 0)

Pair = tuple[int, int]  # A patch of the first image and one of the second, by their numbers row by row


def side_by_side(
    images: tuple[Tensor, Tensor],
    heatmaps: tuple[Tensor, Tensor],
    pairs: Sequence[Pair],
    title: str,
    method: str,
    size: int = SIZE,
    smooth: bool = True,
) -> Image.Image:
    """Draw two heatmaps over their images, and numbered lines between patches that match.

    For other arguments see `draw_annotated`.

    Args:
        images: uint8, (3, H, W) each.
        heatmaps: (rows, columns) each; higher is more like the other image.
        pairs: see `Pair`.
    """
    drawn = [
        draw_on_photo(to_pillow(image), heatmap, None, size, smooth, signed=True)
        for image, heatmap in zip(images, heatmaps, strict=True)
    ]
    across, down = drawn[0].size
    gap = size // 8
    width = 2 * across + gap
    canvas, draw, margin, top = titled_canvas(width, down, title, [f"by {method}"])
    corners = (margin, top), (margin + across + gap, top)
    for corner, each in zip(corners, drawn, strict=True):
        canvas.paste(each, corner)
    for number, pair in reversed(list(enumerate(pairs))):  # the strongest last, over the others
        boxes = [
            _box(patch, heatmap, corner, (across, down))
            for patch, heatmap, corner in zip(pair, heatmaps, corners, strict=True)
        ]
        _draw_pair(draw, boxes, number, max(size // 200, 2), size / 24)
    draw_legend(draw, (margin, top + down + margin), width, True, LIKENESS)
    return canvas


def _box(patch: int, heatmap: Tensor, corner: tuple[int, int], size: tuple[int, int]) -> tuple[float, ...]:
    """Left, top, right and bottom of a patch on the canvas, of an image with its corner and `size` (W, H) there."""
    rows, columns = heatmap.shape
    row, column = divmod(patch, columns)
    width, height = size[0] / columns, size[1] / rows
    left, top = corner[0] + column * width, corner[1] + row * height
    return left, top, left + width, top + height


def _draw_pair(
    draw: ImageDraw.ImageDraw, boxes: Sequence[tuple[float, ...]], number: int, width: int, size: float
) -> None:
    """Draw a line between two patches, a frame around each, and the number of the pair beside each."""
    colour = MARKS[number % len(MARKS)]
    ends = [((left + right) / 2, (top + bottom) / 2) for left, top, right, bottom in boxes]
    draw.line(ends, BLACK, 2 * width)
    draw.line(ends, colour, width)
    font = ImageFont.load_default(size)
    for left, top, right, bottom in boxes:
        draw.rectangle((left - width, top - width, right + width, bottom + width), outline=BLACK, width=width)
        draw.rectangle((left, top, right, bottom), outline=colour, width=width)
    for x, y in ends:
        radius = 0.62 * size
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), colour, BLACK, max(width // 2, 1))
        draw.text((x, y), str(number + 1), BLACK, font, "mm")
