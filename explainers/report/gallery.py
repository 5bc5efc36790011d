"""One HTML page with the images, heatmaps, numbers and curves of an evaluation; it opens without server and network."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.colors import to_hex
from PIL import Image
from torch import Tensor

from explainers.errors import InputError
from explainers.metrics.pairs import Pairs
from explainers.report.differences import Compared
from explainers.report.html_pages import COMPRESSED, data_url, encode_bytes, fill_page, photo_url, round_numbers
from explainers.report.labels import choose_colours, make_title, names_in
from explainers.report.overlays import CONSTANT, OPACITY, PALE, colour_scale, colour_shades, ends, legend_colours
from explainers.report.results import Results
from explainers.report.tables import rows

STEPS = 127  # number of steps from no colour to the full colour of a stored heatmap
SHADES = torch.linspace(-1, 1, 2 * STEPS + 1)  # that a stored heatmap can have
SCRIPTS = "paint.js", "find.js", "images.js", "results.js", "differences.js", "page.js"
"""Parts of the page's script, in their order."""

CURVE = "_curve"  # how names of curves against sparsity end


@dataclass(frozen=True)
class Picture:
    """One image of a gallery, and what explainers show in it.

    Args:
        name: name of the image, such as its file or number.
        image: uint8, (3, H, W).
        label: name of its class; `None` if it is unknown.
        classes: name → score, such as the probability, of the explained classes; the first is the one that all
            explainers explain.
        heatmaps: explainer → class → heatmap (rows, columns); an explainer of a single class has only that.
        truth: True in the boxes of the object, boolean (H, W); `None` if it is unknown.
        signed: explainer → whether its heatmaps are signed, see `overlay`.

    Raises:
        InputError: for images, heatmaps or objects of other shapes or types, and for NaN.
    """

    name: str
    image: Tensor
    label: str | None
    classes: Mapping[str, float]
    heatmaps: Mapping[str, Mapping[str, Tensor]]
    truth: Tensor | None = None
    signed: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        image, truth = self.image, self.truth
        if image.dtype != torch.uint8 or image.dim() != 3 or len(image) != 3:
            raise self._error("an image (3, H, W) of uint8", image)
        if truth is not None and (truth.dtype != torch.bool or truth.shape != image.shape[1:]):
            raise self._error(f"truth as booleans {list(image.shape[1:])}", truth)
        for heatmap in (each for by_class in self.heatmaps.values() for each in by_class.values()):
            if heatmap.dim() != 2 or not heatmap.numel() or not heatmap.isfinite().all():
                raise self._error("finite heatmaps (rows, columns)", heatmap)

    def _error(self, wanted: str, got: Tensor) -> InputError:
        return InputError(f"{self.name}: expected {wanted}, got {got.dtype} {list(got.shape)}: measure again")


def gallery_html(
    title: str,
    pictures: Mapping[str, Sequence[Picture]],
    results: Results,
    columns: Mapping[str, str],
    notes: Sequence[str] = (),
    pairs: Compared | None = None,
) -> str:
    """Make a page that shows heatmaps over images in the colours of `overlays`, a sortable table, and curves.

    Args:
        title: title of the page.
        pictures: task → its images.
        results: task → explainer → numbers; without any, the page has no table and no curves.
        columns: number → column title, in the order of the columns; an arrow says which values are better.
        notes: lines below the title.
        pairs: the explainers `compared` on the same images; without any, the page has no table of differences.

    Returns:
        HTML, in ASCII.

    >>> picture = Picture("0.png", torch.zeros(3, 8, 8, dtype=torch.uint8), None, {"a <b>": 1.0}, {})
    >>> page = gallery_html("digits", {"loop": [picture]}, results={}, columns={})
    >>> page.isascii(), "a <b>" in page
    (True, False)
    """
    shown = [name for several in pictures.values() for picture in several for name in picture.heatmaps]
    explainers = list(dict.fromkeys([*names_in(results), *shown]))
    measured = [numbers for by_explainer in results.values() for numbers in by_explainer.values()]
    numbers = [name for name in columns if any(name in each for each in measured)]
    numbers = [] if numbers == ["forward_passes"] else numbers  # heatmaps were made, and nothing was measured
    curves = list(dict.fromkeys(key for each in measured for key in each if key.endswith(CURVE)))
    tasks = dict.fromkeys([*pictures, *results])
    content = {
        "title": title,
        "notes": list(notes),
        "colours": colour_shades(SHADES).round().int().tolist(),
        "opacity": OPACITY,
        "pale": PALE,
        "constant": CONSTANT,
        "legends": [
            {"signed": signed, "colours": legend_colours(signed, 9), "ends": ends(signed, "it")}
            for signed in (True, False)
        ],
        "steps": STEPS,
        "explainers": [
            {"name": make_title(name), "colour": to_hex(colour)} for name, colour in choose_colours(explainers).items()
        ],
        "columns": [columns[name] for name in numbers],
        "curves": [
            columns.get(key) or columns.get(name := key.removesuffix(CURVE)) or name.replace("_", " ") for key in curves
        ],
        "tasks": [
            {
                "name": task,
                "pictures": [_picture(picture, explainers) for picture in pictures.get(task, ())],
                "rows": _rows(results.get(task, {}), {name: columns[name] for name in numbers}, curves, explainers),
                "differences": [_differences((pairs or {}).get(task, {}).get(name), explainers) for name in numbers],
            }
            for task in tasks
        ],
    }
    return fill_page("page", SCRIPTS, content)


def _rows(
    measured: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str], curves: Sequence[str], names: list[str]
) -> list[dict[str, Any]]:
    """One row of the table for each explainer, as written and as numbers, with its curves."""
    written = rows({"": measured}, columns)
    return [
        {
            "explainer": names.index(name),
            "text": [line.get(title, "–") for title in columns.values()],
            "values": [_finite(numbers.get(column)) for column in columns],
            "sparsity": numbers.get("sparsity", []),
            "curves": [[_finite(value) for value in numbers.get(key, ())] for key in curves],
        }
        for (name, numbers), line in zip(measured.items(), written, strict=True)
    ]


def _differences(pair: tuple[list[str], Pairs] | None, explainers: list[str]) -> dict[str, Any] | None:
    """Numbers of explainers, and the matrices of what each has more than each other; `None` without pairs."""
    if pair is None:
        return None
    names, pairs = pair
    matrices = {"mean": pairs.mean, "half": pairs.half_width, "significant": pairs.significant}
    rounded = {key: round_numbers(matrix.tolist()) for key, matrix in matrices.items()}
    return {"explainers": [explainers.index(name) for name in names]} | rounded


def _finite(value: float | None) -> float | None:
    """The number, or `None` where there is none: JSON has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def _picture(picture: Picture, explainers: list[str]) -> dict[str, Any]:
    """A picture for the page. Explainers and classes are numbered, because JavaScript reorders keys such as "10"."""
    truth = picture.truth
    return {
        "name": picture.name,
        "label": picture.label,
        "width": picture.image.shape[2],
        "height": picture.image.shape[1],
        "image": photo_url(picture.image),
        "truth": None if truth is None else data_url(Image.fromarray(truth.cpu().numpy()), "png", **COMPRESSED),
        "classes": [{"name": name, "probability": _finite(value)} for name, value in picture.classes.items()],
        "heatmaps": [
            {"explainer": explainers.index(name), **_heatmaps(by_class, picture.classes, picture.signed.get(name))}
            for name, by_class in sorted(picture.heatmaps.items(), key=lambda item: explainers.index(item[0]))
        ],
    }


def _heatmaps(by_class: Mapping[str, Tensor], classes: Iterable[str], signed: bool | None) -> dict[str, Any]:
    if signed is None:
        signed = any(colour_scale(heatmap).signed for heatmap in by_class.values())
    columns = next(iter(by_class.values())).shape[1]
    return {"signed": signed, "columns": columns, "maps": [_quantise(by_class.get(each), signed) for each in classes]}


def _quantise(heatmap: Tensor | None, signed: bool) -> str | None:
    """The shades of `overlays`, −127 to 127 for the full colours: base64 of signed bytes, row by row."""
    if heatmap is None:
        return None
    shades = colour_scale(heatmap, signed).shades(heatmap)
    return encode_bytes(shades.mul(STEPS).round().to(torch.int8))
