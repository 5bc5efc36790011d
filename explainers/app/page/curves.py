"""A small figure of how a probability or similarity falls while patches are hidden."""

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7")
"""Colours of the explainers, in the order of their columns."""

GREY = "#8b929c"
"""Colour of chance."""

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 38, 10, 8, 34
"""Size of the figure and of its margins, in pixels."""


def curves_svg(curves: Mapping[str, Sequence[float]]) -> str:
    """Draw curves over the fraction of hidden patches, from 0 to 1, as SVG.

    The page draws points into it; the attributes `data-*` tell where the axes are.

    Args:
        curves: label → scores at equally spaced fractions, such as probabilities. The last one is chance.

    >>> svg = curves_svg({"GAE": [0.9, 0.1], "chance": [0.9, 0.5]})
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
        f'<path class="axes" d="M{LEFT} {TOP}V{TOP + height}H{LEFT + width}"/>{_ticks(lowest, highest, width, height)}'
        f'{"".join(reversed(lines))}<g class="points"></g></svg>'
    )


def _ticks(lowest: float, highest: float, width: int, height: int) -> str:
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
