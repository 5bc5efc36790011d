"""What the page asks, and the answers that its JavaScript draws: plain data, without Gradio."""

import base64
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from explainers.app.page.curves import curves_svg
from explainers.app.page.shown import CHANCE, LEVELS, Shown, Side
from explainers.app.saving import data_url
from explainers.errors import InputError, check_range
from explainers.report.overlays import BLUE, RED, annotated, shades
from explainers.target.names import class_index

MOST_METHODS = 4
"""Number of explainers that are shown side by side."""


def opened(shown: Shown) -> dict[str, Any]:
    """The picture, in colours and in grey, and the most probable classes."""
    pixels = np.asarray(shown.picture)
    grey = Image.fromarray(pixels.mean(-1).round().astype(np.uint8))
    mean = (shown.target.mean.flatten() * 255).round().int().tolist()
    return {
        "picture": data_url(shown.picture, "jpeg", quality=90),
        "grey": data_url(grey, "jpeg", quality=90),
        "name": shown.name,
        "side": shown.grid.side,
        "hiding": f"rgb({', '.join(map(str, mean))})",
        "classes": [[each.index, each.name, each.score] for each in shown.explanation.classes],
        "chance": shown.orders(CHANCE, 0)[0].tolist(),
    }


def heatmap(shown: Shown, method: str, index: int) -> dict[str, Any]:
    """The colours of a heatmap, RGBA row by row, the order of its patches, and the class."""
    chosen = class_index(index, shown.session.names)
    heatmap = shown.heatmap(method, chosen)
    return {
        "colours": base64.b64encode(colours_of(heatmap).numpy().tobytes()).decode(),
        "order": shown.orders(method, chosen)[0].tolist(),
        "class": [chosen, shown.session.names[chosen], shown.explanation.scores[chosen].item()],
    }


def curves(shown: Shown, methods: Sequence[str], index: int, side: Side) -> dict[str, Any]:
    """How the probability falls while patches are hidden, in the orders of methods and at random: a small figure."""
    check_range(0, MOST_METHODS, methods=len(methods))
    chosen = class_index(index, shown.session.names)
    values = {method: shown.curve(method, chosen, side) for method in [*methods, CHANCE]}
    return {"svg": curves_svg(values), "values": values, "levels": LEVELS}


def probabilities(shown: Shown, index: int, hidden: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The probability of a class with hidden patches, for several sets of patches."""
    check_range(0, MOST_METHODS + 1, sets=len(hidden))
    return {"values": shown.probabilities(class_index(index, shown.session.names), hidden)}


def picture(shown: Shown, methods: Sequence[str], index: int, opacity: float, smooth: bool) -> dict[str, Any]:
    """A PNG with the heatmaps of methods beside one another, titles and legends, and a name for its file."""
    check_range(1, MOST_METHODS, methods=len(methods))
    chosen = class_index(index, shown.session.names)
    name = shown.session.names[chosen]
    pixels = torch.from_numpy(np.array(shown.picture)).permute(2, 0, 1)
    title = f"{name} {shown.explanation.scores[chosen].item():.2f}"
    parts = [
        annotated(pixels, shown.heatmap(method, chosen), f"{title}, {method}", opacity=opacity, smooth=smooth)
        for method in methods
    ]
    whole = Image.new("RGB", (sum(part.width for part in parts), max(part.height for part in parts)), "white")
    for number, part in enumerate(parts):
        whole.paste(part, (sum(each.width for each in parts[:number]), 0))
    stem = re.sub(r"[^\w-]+", "_", f"{shown.name.rsplit('.', 1)[0]}_{name}")
    return {"url": data_url(whole, "png"), "file": f"{stem}.png"}


ANSWERS: tuple[Callable[..., dict[str, Any]], ...] = (heatmap, curves, probabilities, picture)
"""What a browser may ask about its image."""


def checked_methods(question: dict[str, Any], known: Sequence[str]) -> None:
    """Raise an InputError if a question names a method that this page does not have."""
    asked = [question["method"]] if "method" in question else question.get("methods", [])
    unknown = [method for method in asked if method not in known]
    if unknown:
        raise InputError(f"expected one of {', '.join(known)}, got {unknown[0]!s:.60}")


def colours_of(heatmap: Tensor) -> Tensor:
    """Red above and blue below the median, as in `overlay`, with the strength as opacity: uint8 (P, P, 4)."""
    values = shades(heatmap)[..., None]
    colours = torch.where(values > 0, torch.tensor(RED), torch.tensor(BLUE))
    return torch.cat([colours, 255 * values.abs()], -1).round().to(torch.uint8)
