"""What browsers ask about their images, and the answers that the page's JavaScript draws: plain data."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from explainers.app.explanation import picture_name, summarise, write_score
from explainers.app.page.images import CHANCE, LEVELS, MOST_TEXTS, PICTURE_SIZE, Index, OpenedImage, Side
from explainers.errors import check_range
from explainers.report.html_pages import data_url, encode_bytes
from explainers.report.overlays import (
    CONSTANT,
    OPACITY,
    UNSEEN,
    ColourScale,
    colour_scale,
    colour_shades,
    draw_annotated,
    ends,
    enlarge_shades,
    fade,
    legend_colours,
    sees_all,
    to_pillow,
    to_tensor,
)
from explainers.report.side_by_side import LIKENESS

MOST_METHODS = 4
"""Number of explainers that are shown side by side."""

TILE = 128
"""About the longer side of the smooth colours of a heatmap, in pixels."""

SHADES = 255
"""Number of shades of pairs of patches."""

STEPS = 32767
"""Number of steps from 0 to the largest value of pairs of patches."""

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7")
"""Colours of the explainers, in the order of their columns."""

GREY = "#8b929c"
"""Colour of chance."""

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 38, 10, 8, 34
"""Size of the figure and of its margins, in pixels."""


def describe_image(image: OpenedImage) -> dict[str, Any]:
    """The photo, and its paler copy below heatmaps, and the most probable classes, if the model has some.

    `box` is where in both pictures the patches are; around it they are grey.
    """
    pixels = to_tensor(image.picture)
    pictures = {"picture": fade(pixels, image.box, 0), "pale": fade(pixels, image.box)}
    mean = (image.target.mean.flatten() * 255).round().int().tolist()
    rows, columns = image.grid.shape
    return {name: data_url(to_pillow(each), "jpeg", quality=90) for name, each in pictures.items()} | {
        "name": image.name,
        "rows": rows,
        "columns": columns,
        "box": image.box,
        "unseen": "" if sees_all(image.picture, image.box) else UNSEEN,
        "hiding": f"rgb({', '.join(map(str, mean))})",
        "classes": [list(each) for each in image.classes],
        "digits": 4 if image.session.target.score == "value" else None,
        "prompts": image.session.takes_texts,
        "chance": image.orders(CHANCE, Index(0))[0].tolist(),
    }


def heatmap(image: OpenedImage, method: str, index: int | str, against: Sequence[int | str] = ()) -> dict[str, Any]:
    """The colours of a heatmap, what they mean, the order of its patches, and the class; see `Index`."""
    chosen = image.parse_index(index, against)
    heatmap = image.heatmap(method, chosen)
    scale = colour_scale(heatmap, image.signed(method, chosen))
    return {
        "tiles": encode_colours(heatmap, scale),
        "legend": describe_legend(scale, ends(scale.signed, *name_ends(image, chosen))),
        "order": image.orders(method, chosen)[0].tolist(),
        "class": [index, image.title(chosen.wanted), image.score(chosen.wanted)],
    }


def curves(
    image: OpenedImage, methods: Sequence[str], index: int | str, side: Side, against: Sequence[int | str] = ()
) -> dict[str, Any]:
    """How the score falls while patches are hidden, in the orders of methods and at random: a figure, and its axis."""
    check_range(0, MOST_METHODS, methods=len(methods))
    chosen = image.parse_index(index, against)
    values = {method: image.curve(method, chosen, side) for method in [*methods, CHANCE]}
    return {"svg": draw_curves(values), "values": values, "levels": LEVELS, "axis": describe_score(image, chosen)}


def prompts(image: OpenedImage, texts: Sequence[str]) -> dict[str, Any]:
    """The similarity of texts that a visitor has typed for other images."""
    check_range(0, MOST_TEXTS, texts=len(texts))
    return {"classes": [[text, text, image.score(image.parse_index(text).wanted)] for text in texts]}


def scores(
    image: OpenedImage, index: int | str, hidden: Sequence[Sequence[int]], against: Sequence[int | str] = ()
) -> dict[str, Any]:
    """The score of a class or text with hidden patches, for several sets of patches, and that of the `whole` image."""
    check_range(0, MOST_METHODS + 1, sets=len(hidden))
    *values, whole = image.scores(image.parse_index(index, against), [*hidden, []])
    return {"values": values, "whole": whole}


def picture(
    image: OpenedImage, methods: Sequence[str], index: int | str, smooth: bool, against: Sequence[int | str] = ()
) -> dict[str, Any]:
    """A PNG with the heatmaps of methods below one another, titles and legends, and a name for its file."""
    check_range(1, MOST_METHODS, methods=len(methods))
    chosen = image.parse_index(index, against)
    name, other = name_ends(image, chosen)
    is_text = isinstance(chosen.wanted, str)
    score = write_score(image.score(chosen.wanted), image.session.quantity(is_text))
    apart = summarise([*map(image.title, chosen.against)], "text" if is_text else "class")
    parts = []
    for method in methods:
        drawn = image.heatmap(method, chosen), f"{name} {score}{apart}", name, method
        signed = image.signed(method, chosen)
        parts.append(draw_annotated(image.picture, *drawn, image.box, PICTURE_SIZE, smooth, signed, other))
    whole = Image.new("RGB", (parts[0].width, sum(part.height for part in parts)), "white")
    for number, part in enumerate(parts):
        whole.paste(part, (0, sum(each.height for each in parts[:number])))
    return {"url": data_url(whole, "png"), "file": picture_name(image.name, "_".join(methods), name + apart)}


def alike(image: OpenedImage, other: OpenedImage) -> dict[str, Any]:
    """Why an image is like another one: heatmaps of both, and what each pair of patches adds, as 16-bit steps."""
    found, method = image.compare(other)
    pairs = found.pairs[0]
    scale = pairs.abs().max().clamp(min=1e-30).item() / STEPS
    heatmaps = found.of_first[0], found.of_second[0]
    scales = [colour_scale(heatmap, signed=True) for heatmap in heatmaps]
    return {
        "similarity": found.similarity.item(),
        "method": method,
        "tiles": [encode_colours(heatmap, scale) for heatmap, scale in zip(heatmaps, scales, strict=True)],
        "legends": [describe_legend(scale, LIKENESS) for scale in scales],
        "shades": shade_rgba(torch.linspace(-1, 1, SHADES)).tolist(),
        "pairs": encode_bytes((pairs / scale).round().to(torch.int16)),
        "scale": scale,
        "ties": found.strongest(apart=1)[0].tolist(),
    }


def name_ends(image: OpenedImage, index: Index) -> tuple[str, str]:
    """What is explained, and the one other that it is told apart from, for `ends`."""
    return image.title(index.wanted), image.title(index.against[0]) if len(index.against) == 1 else ""


def describe_score(image: OpenedImage, index: Index) -> str:
    """What `OpenedImage.scores` are, for people."""
    quantity = image.session.quantity(isinstance(index.wanted, str))
    name, other = name_ends(image, index)
    apart = f" minus that of {other or f'{len(index.against)} others, on average,'}" if index.against else ""
    return f"The {'output' if quantity == 'value' else f'{quantity} of'} {name}{apart}"


VIEWS: dict[str, Callable[..., dict[str, Any]]] = {
    view.__name__: view for view in (heatmap, curves, prompts, scores, picture, alike)
}
"""What a browser may ask about its image."""


def encode_colours(heatmap: Tensor, scale: ColourScale) -> dict[str, tuple[str, int]]:
    """The colours of `overlay`, as `patches` and `smooth`: base64 of RGBA bytes, row by row, and the number of columns.

    The smooth ones have several pixels for each patch, between which browsers interpolate.
    """
    shades = scale.shades(heatmap)
    rows, columns = shades.shape
    finer = max(TILE // max(rows, columns), 1)
    tiles = {"patches": shades, "smooth": enlarge_shades(shades, (finer * rows, finer * columns), smooth=True)}
    return {name: (encode_bytes(shade_rgba(each)), each.shape[1]) for name, each in tiles.items()}


def shade_rgba(shades: Tensor) -> Tensor:
    """The colours of shades (...) as the page draws them, RGBA: uint8 (..., 4)."""
    return (colour_shades(shades) * torch.tensor([1, 1, 1, OPACITY])).round().to(torch.uint8)


def describe_legend(scale: ColourScale, words: Sequence[str]) -> dict[str, Any]:
    """The bar that explains the colours of a heatmap: RGB from its lowest to its highest value, and `words`.

    A constant heatmap has a sentence in its place.
    """
    if scale.constant:
        return {"colours": [], "words": [CONSTANT]}
    return {"colours": legend_colours(scale.signed, 9), "words": words}


def draw_curves(curves: Mapping[str, Sequence[float]]) -> str:
    """Draw curves over the fraction of hidden patches, from 0 to 1, as SVG; the horizontal axis is at a score of 0.

    The page draws points into it; the attributes `data-*` tell where the axes are.

    Args:
        curves: label → scores at equally spaced fractions, such as probabilities. The last one is chance.

    >>> svg = draw_curves({"GAE": [0.9, 0.1], "chance": [0.9, 0.5]})
    >>> svg.count("<polyline"), 'points="38.0,8.0 350.0,139.6"' in svg
    (2, True)
    """
    every = [value for values in curves.values() for value in values]
    lowest = min(0.0, *every)
    highest = max(lowest, *every)
    highest = highest if highest > lowest else lowest + 1
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    unit = height / (highest - lowest)
    *methods, chance = curves
    colours = dict(zip(methods, COLOURS, strict=False)) | {chance: GREY}
    lines = []
    for label, values in curves.items():
        points = " ".join(
            f"{LEFT + width * number / (len(values) - 1):.1f},{TOP + (highest - value) * unit:.1f}"
            for number, value in enumerate(values)
        )
        title = f"<title>{escape(label)}</title>"
        lines.append(f'<polyline stroke="{colours[label]}" points="{points}">{title}</polyline>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Score while patches are hidden"'
        f' data-left="{LEFT}" data-top="{TOP}" data-width="{width}" data-height="{height}"'
        f' data-lowest="{lowest}" data-highest="{highest}">'
        f'<path class="axes" d="M{LEFT} {TOP}V{TOP + height}M{LEFT} {TOP + highest * unit:.1f}H{LEFT + width}"/>'
        f'{_draw_ticks(lowest, highest, width, height)}{"".join(reversed(lines))}<g class="points"></g></svg>'
    )


def _draw_ticks(lowest: float, highest: float, width: int, height: int) -> str:
    """Numbers at the ends of both axes, and the name of the horizontal one."""
    below = TOP + height + 14
    texts = [
        (LEFT - 5, TOP + 9, "end", f"{highest:.2f}"),
        (LEFT - 5, TOP + height, "end", f"{lowest:.2f}" if lowest else "0"),
        (LEFT, below, "start", "0"),
        (LEFT + width, below, "end", "100 %"),
        (LEFT + width / 2, below + 14, "middle", "hidden patches"),
    ]
    return "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in texts)
