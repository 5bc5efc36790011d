"""Tables, pictures and the gallery of a run, made of its files alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchvision.transforms.functional import to_pil_image

from explainers.evaluation import report
from explainers.evaluation.gallery import Picture, write_gallery
from explainers.evaluation.pictures import read_pictures
from explainers.evaluation.results import Results, load, read_columns, read_results
from explainers.files import atomic, write_atomically
from explainers.overlays import draw_heatmaps, overlay

DRAWN = 6
"""Number of images of a task in its PNG file."""


def publish(
    folder: Path, files: Sequence[str | Path], reference: report.Reference | None = None, overlays: bool = False
) -> str:
    """Write table.md, table.tex, results.csv, gallery.html and a PNG file with the heatmaps of each task.

    Args:
        folder: folder to write to.
        files: results.json files; the pictures beside them are shown.
        reference: published values to show next to the results.
        overlays: also write one PNG file of each picture and explainer, to the folder overlays.

    Returns:
        The table, as Markdown; empty if there are no results.
    """
    results, columns = read_results(files), read_columns(files)
    tables = report.tables(results, columns, reference)
    for name, text in tables.items():
        write_atomically(folder / name, text)
    pictures = {task: shown for task in results if (shown := _pictures(files, task, results))}
    for task, shown in pictures.items():
        _draw(shown, folder / f"{task}.png")
        for number, picture in enumerate(shown if overlays else ()):
            _write_overlays(picture, folder / "overlays", f"{number:04d}_{Path(picture.name).stem}")
    if results:
        notes = [line for path in files for line in _notes(load(path))]
        write_gallery(folder / "gallery.html", folder.name, pictures, results, columns, notes)
    return tables.get("table.md", "")


def _pictures(files: Sequence[str | Path], task: str, results: Results) -> list[Picture]:
    """The pictures of a task, with the heatmaps of all folders that have the same images and classes."""
    paths = [Path(path).parent / "pictures" / f"{task}.safetensors" for path in files]
    pictures: list[Picture] = []
    for more in (read_pictures(path, list(results[task])) for path in paths if path.exists()):
        if not pictures:
            pictures = more
        elif [(one.name, one.classes) for one in pictures] == [(other.name, other.classes) for other in more]:
            pairs = zip(pictures, more, strict=True)
            pictures = [replace(one, heatmaps={**other.heatmaps, **one.heatmaps}) for one, other in pairs]
    return pictures


def _draw(pictures: Sequence[Picture], path: Path) -> None:
    """Draw images from all over the list: their heatmaps of the class that all explainers explain."""
    chosen = [pictures[i] for i in torch.linspace(0, len(pictures) - 1, min(DRAWN, len(pictures))).long()]
    names = [name for name in chosen[0].heatmaps if all(name in picture.heatmaps for picture in chosen)]
    first = [next(iter(picture.classes)) for picture in chosen]
    heatmaps = {
        name: torch.stack([picture.heatmaps[name][own] for picture, own in zip(chosen, first, strict=True)])
        for name in names
    }
    outlines = [picture.truth for picture in chosen if picture.truth is not None]
    truth = torch.stack(outlines) if len(outlines) == len(chosen) else None
    figure = draw_heatmaps(torch.stack([picture.image for picture in chosen]), heatmaps, truth, first)
    with atomic(path) as unfinished:
        figure.savefig(unfinished, dpi=120)


def _write_overlays(picture: Picture, folder: Path, name: str) -> None:
    """Write the heatmaps of one image: `<name>_<explainer>.png`, of the class that all explainers explain."""
    own = next(iter(picture.classes))
    for explainer, heatmaps in picture.heatmaps.items():
        with atomic(folder / f"{name}_{explainer}.png") as unfinished:
            to_pil_image(overlay(picture.image, heatmaps[own])).save(unfinished)


def _notes(content: Mapping[str, Any]) -> list[str]:
    """What was measured, and by which commands."""
    lines = []
    for task, identity in content.get("identity", {}).items():
        shown = {key: identity[key] for key in ("backbone", "images", "classes", "levels", "order") if key in identity}
        shown |= {"removals": ", ".join(identity["removals"])} if "removals" in identity else {}
        lines.append(f"{task}: {'; '.join(f'{key} {value}' for key, value in shown.items())}")
    commands = [" ".join(record["command"]) for record in content.get("runs", ())]
    return lines + [re.sub(r"^\S*?(\w+\.py)", r"python \1", command) for command in commands]
