"""Two images side by side, with what makes them alike: heatmaps, and the pairs of patches that match best."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from explainers.errors import check_range
from explainers.report.overlays import check_drawn, draw_legend, overlay, resize_image, titled_canvas, to_pillow

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
    opacity: float = 0.8,
    smooth: bool = False,
    size: int | None = None,
    legend: bool = True,
    method: str = "",
) -> Image.Image:
    """Draw two heatmaps over their images, and numbered lines between patches that match.

    For other arguments see `draw_annotated`.

    Args:
        images: uint8, (3, H, W) each.
        heatmaps: (rows, columns) each; higher is more like the other image.
        pairs: see `Pair`.
        size: longer side of each image in pixels, from 192 to 8192; by default that of the larger one, at least 448.
    """
    for image, heatmap in zip(images, heatmaps, strict=True):
        check_drawn(image, heatmap, opacity)
    side = max(448, *images[0].shape[1:], *images[1].shape[1:]) if size is None else size
    check_range(192, 8192, size=side)
    gap = side // 8
    drawn = [
        to_pillow(overlay(resize_image(image, side), heatmap, opacity, smooth, signed=True))
        for image, heatmap in zip(images, heatmaps, strict=True)
    ]
    width, height = drawn[0].width + gap + drawn[1].width, max(each.height for each in drawn)
    canvas, draw, margin, top = titled_canvas(width, height, side, title, [method], legend)
    corners = (margin, top), (margin + drawn[0].width + gap, top)
    for corner, each in zip(corners, drawn, strict=True):
        canvas.paste(each, corner)
    steps = [each.width / heatmap.shape[1] for each, heatmap in zip(drawn, heatmaps, strict=True)]
    for number, pair in reversed(list(enumerate(pairs))):  # the strongest last, over the others
        boxes = [
            _box(patch, heatmap.shape[1], corner, step)
            for patch, heatmap, corner, step in zip(pair, heatmaps, corners, steps, strict=True)
        ]
        _draw_pair(draw, boxes, number, max(side // 200, 2), side / 24)
    if legend:
        draw_legend(draw, (margin, top + height + margin), drawn[0].width, True, LIKENESS)
    return canvas


def _box(patch: int, across: int, corner: tuple[int, int], step: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a patch on the canvas."""
    row, column = divmod(patch, across)
    left, top = corner[0] + column * step, corner[1] + row * step
    return left, top, left + step, top + step


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
