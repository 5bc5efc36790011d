"""What the page asks, and the answers that its JavaScript draws: plain data, without Gradio."""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from explainers.app.explanation import data_url, picture_name
from explainers.app.page.curves import curves_svg
from explainers.app.page.shown import CHANCE, LEVELS, MOST_TEXTS, Shown, Side, Text
from explainers.app.texts import summarise
from explainers.errors import InputError, check_range
from explainers.report.overlays import BLUE, CONSTANT, RED, ColourScale, annotated, colour_scale, legend_colours, tints
from explainers.report.side_by_side import LIKENESS

MOST_METHODS = 4
"""Number of explainers that are shown side by side."""

STEPS = 32767
"""Number of steps from 0 to the largest value of pairs of patches."""


def opened(shown: Shown) -> dict[str, Any]:
    """The picture, in colours and in grey, and the most probable classes, if the model has some."""
    pixels = np.asarray(shown.picture)
    grey = Image.fromarray(pixels.mean(-1).round().astype(np.uint8))
    mean = (shown.target.mean.flatten() * 255).round().int().tolist()
    return {
        "picture": data_url(shown.picture, "jpeg", quality=90),
        "grey": data_url(grey, "jpeg", quality=90),
        "name": shown.name,
        "side": shown.grid.side,
        "hiding": f"rgb({', '.join(map(str, mean))})",
        "classes": [list(each) for each in shown.classes],
        "prompts": shown.session.takes_texts,
        "chance": shown.orders(CHANCE, 0)[0].tolist(),
    }


def heatmap(shown: Shown, method: str, index: Any, against: Sequence[str] = ()) -> dict[str, Any]:
    """The colours of a heatmap, RGBA row by row, what they mean, the order of its patches, and the class."""
    chosen = shown.checked(index, against)
    heatmap = shown.heatmap(method, chosen)
    scale = colour_scale(heatmap, shown.signed(method))
    return {
        "colours": colours_of(heatmap, scale),
        "legend": legend(scale, ("opposes", "0", "supports")),
        "order": shown.orders(method, chosen)[0].tolist(),
        "class": [index, shown.title(chosen), shown.score(chosen)],
    }


def curves(shown: Shown, methods: Sequence[str], index: Any, side: Side, against: Sequence[str] = ()) -> dict[str, Any]:
    """How the score falls while patches are hidden, in the orders of methods and at random: a small figure."""
    check_range(0, MOST_METHODS, methods=len(methods))
    chosen = shown.checked(index, against)
    values = {method: shown.curve(method, chosen, side) for method in [*methods, CHANCE]}
    return {"svg": curves_svg(values), "values": values, "levels": LEVELS}


def prompts(shown: Shown, texts: Sequence[str]) -> dict[str, Any]:
    """The similarity of texts that a visitor has typed for other images."""
    check_range(0, MOST_TEXTS, texts=len(texts))
    return {"classes": [[text, text, shown.score(shown.checked(text))] for text in texts]}


def scores(shown: Shown, index: Any, hidden: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The score of a class or text with hidden patches, for several sets of patches."""
    check_range(0, MOST_METHODS + 1, sets=len(hidden))
    return {"values": shown.scores(shown.checked(index), hidden)}


def picture(
    shown: Shown, methods: Sequence[str], index: Any, opacity: float, smooth: bool, against: Sequence[str] = ()
) -> dict[str, Any]:
    """A PNG with the heatmaps of methods beside one another, titles and legends, and a name for its file."""
    check_range(1, MOST_METHODS, methods=len(methods))
    chosen = shown.checked(index, against)
    name = shown.title(chosen)
    kind = "text" if isinstance(chosen, Text) else "class"
    pixels = torch.from_numpy(np.array(shown.picture)).permute(2, 0, 1)
    title = f"{name} {shown.score(chosen):.2f}"
    if isinstance(chosen, Text) and chosen.against:
        title += f" against {summarise(chosen.against)}"
    parts = [
        annotated(
            pixels,
            shown.heatmap(method, chosen),
            title,
            opacity,
            smooth,
            explained=kind,
            method=method,
            signed=shown.signed(method),
        )
        for method in methods
    ]
    whole = Image.new("RGB", (sum(part.width for part in parts), max(part.height for part in parts)), "white")
    for number, part in enumerate(parts):
        whole.paste(part, (sum(each.width for each in parts[:number]), 0))
    return {"url": data_url(whole, "png"), "file": picture_name(shown.name, "_".join(methods), name)}


def alike(shown: Shown, other: Shown) -> dict[str, Any]:
    """Why an image is like another one: heatmaps of both, RGBA, and what each pair of patches adds, as 16-bit steps."""
    found, method = shown.alike(other)
    pairs = found.pairs[0]
    scale = pairs.abs().max().clamp(min=1e-30).item() / STEPS
    heatmaps = found.of_first[0], found.of_second[0]
    scales = [colour_scale(heatmap, signed=True) for heatmap in heatmaps]
    return {
        "similarity": found.similarity.item(),
        "method": method,
        "colours": [colours_of(heatmap, scale) for heatmap, scale in zip(heatmaps, scales, strict=True)],
        "legends": [legend(scale, LIKENESS) for scale in scales],
        "red": RED,
        "blue": BLUE,
        "pairs": base64.b64encode((pairs / scale).round().to(torch.int16).numpy().tobytes()).decode(),
        "scale": scale,
        "ties": found.strongest(apart=1)[0].tolist(),
    }


ANSWERS: tuple[Callable[..., dict[str, Any]], ...] = (heatmap, curves, prompts, scores, picture, alike)
"""What a browser may ask about its image."""


def checked_methods(question: dict[str, Any], known: Sequence[str]) -> None:
    """Raise an InputError if a question names a method that this page does not have."""
    asked = [question["method"]] if "method" in question else question.get("methods", [])
    unknown = [method for method in asked if method not in known]
    if unknown:
        raise InputError(f"expected one of {', '.join(known)}, got {unknown[0]!s:.60}")


def colours_of(heatmap: Tensor, scale: ColourScale) -> str:
    """The colours of `overlay`, with their strength as opacity: base64 of RGBA bytes, row by row."""
    shades = scale.shades(heatmap)
    colours = torch.cat([tints(shades, scale.signed), 255 * shades.abs()[..., None]], -1)
    return base64.b64encode(colours.round().to(torch.uint8).numpy().tobytes()).decode()


def legend(scale: ColourScale, words: Sequence[str]) -> dict[str, Any]:
    """The bar that explains the colours of a heatmap: RGB from its lowest to its highest value, and `words` if signed.

    A constant heatmap has a sentence in its place.
    """
    if scale.constant:
        return {"colours": [], "words": [CONSTANT]}
    return {"colours": legend_colours(scale.signed, 9), "words": words if scale.signed else ("less", "more important")}
