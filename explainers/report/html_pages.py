"""HTML pages in one file, which open without server and network."""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from PIL import Image
from torch import Tensor

LOSSLESS = 96
"""Side in pixels up to which images are stored without loss: compression would blur small images and save little."""

COMPRESSED: dict[str, Any] = {"quality": 88, "optimize": True}
"""How images are stored in a page."""


def fill_page(name: str, scripts: Sequence[str], content: Mapping[str, Any]) -> str:
    """The page `name` of this room with its stylesheet, and what its scripts read; HTML, in ASCII.

    Args:
        name: of the files .html and .css; base.css and elements.js are for all pages.
        scripts: further scripts, in their order.
        content: the data, without NaN, which JSON does not have.
    """
    # A `<` would let names end the element that holds the data
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    style, script = ("\n".join(map(_part, parts)) for parts in (["base.css", f"{name}.css"], ["elements.js", *scripts]))
    return Template(_part(f"{name}.html")).substitute(style=style, script=script, data=data)


def _part(name: str) -> str:
    return (files("explainers.report") / "page" / name).read_text(encoding="utf-8")


def photo_url(image: Tensor) -> str:
    """A uint8 image (3, H, W) as data of a page: PNG if it is small, otherwise WebP."""
    pixels = image.permute(1, 2, 0).cpu().contiguous().numpy()
    return data_url(Image.fromarray(pixels), "png" if max(image.shape[1:]) <= LOSSLESS else "webp", **COMPRESSED)


def encode_bytes(values: Tensor) -> str:
    """The bytes of a tensor, in base64."""
    return base64.b64encode(values.numpy().tobytes()).decode()


def round_numbers(value: Any) -> Any:
    """Numbers to four digits, `None` for those that JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: round_numbers(each) for name, each in value.items()}
    return [round_numbers(each) for each in value] if isinstance(value, (list, tuple)) else value


def data_url(image: Image.Image, kind: str = "png", **options: object) -> str:
    """An image as a URL that holds its bytes, in a format of Pillow with its options."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
