"""Makes tables, pictures and the gallery of a run from its files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from explainers.report.differences import compare_pairs, difference_tables
from explainers.report.gallery import Picture, gallery_html
from explainers.report.heatmap_figure import draw_heatmaps
from explainers.report.labels import make_title
from explainers.report.overlays import draw_annotated, to_pillow
from explainers.report.pictures import read_pictures
from explainers.report.results import Results, load, read_columns, read_results, read_scores
from explainers.report.tables import Reference, format_tables
from explainers.saved.files import atomic, file_name, write_atomically

DRAWN = 6  # number of images of a task in its PNG file
NUMBERED = re.compile(r"\d{4,}_")  # how file names of overlays begin


def publish(
    folder: Path,
    files: Sequence[str | Path],
    reference: Reference | None = None,
    overlays: bool = False,
    every_class: bool = False,
    minus: str | None = None,
) -> str:
    """Write table.md, table.tex, results.csv, gallery.html and a PNG file with the heatmaps of each task.

    If the files keep the numbers of images, differences.md and differences.csv compare the explainers in pairs.

    Args:
        folder: folder to write to.
        files: results.json files; the pictures beside them are shown.
        reference: published values to show next to the results.
        overlays: also write one PNG file of each picture and explainer, to the folder overlays/<task>.
        every_class: draw all explained classes of each picture; otherwise only that of the metrics.
        minus: explainer that differences.md subtracts from the others; `None` subtracts the best of each number.

    Returns:
        The table, as Markdown; empty if there are no results.
    """
    results, columns = read_results(files), read_columns(files)
    pairs = compare_pairs(results, read_scores(files), columns)
    tables = format_tables(results, columns, reference)
    differences = difference_tables(results, pairs, columns, minus)
    for name, text in {**tables, **differences}.items():
        write_atomically(folder / name, text)
    for name in {"differences.md", "differences.csv"} - differences.keys():  # of earlier settings
        (folder / name).unlink(missing_ok=True)
    if minus and not pairs:
        print("differences: no file of results keeps the numbers of images: measure again (fresh=true)")
    if results and reference and (line := reference.missing(results)):
        print(line)
    pictures = {task: shown for task in results if (shown := _pictures(files, task, results))}
    for task in results:
        shown, path = pictures.get(task, []), folder / f"{file_name(task)}.png"
        if shown:
            _draw(shown, path, every_class)
        else:
            path.unlink(missing_ok=True)  # of earlier settings
        if overlays or not shown:
            _write_overlays(shown, folder / "overlays" / file_name(task), every_class)
    if results:
        notes = [line for path in files for line in _notes(load(path))]
        page = gallery_html(folder.name, pictures, results, columns, notes, pairs)
        write_atomically(folder / "gallery.html", page)
    return tables.get("table.md", "")


def _pictures(files: Sequence[str | Path], task: str, results: Results) -> list[Picture]:
    """The pictures of a task, with the heatmaps from all folders that have the same images and classes."""
    pictures: list[Picture] = []
    for file in files:
        content = load(file)
        own = content.get("rows", {}).get(task, {})
        keys = {name: own.get(name, "") for name in content["results"].get(task, ())}
        more = read_pictures(Path(file).parent, task, keys)
        if not pictures:
            pictures = more
        elif [(one.name, one.classes) for one in pictures] == [(other.name, other.classes) for other in more]:
            pairs = zip(pictures, more, strict=True)
            pictures = [
                replace(one, heatmaps={**other.heatmaps, **one.heatmaps}, signed={**other.signed, **one.signed})
                for one, other in pairs
            ]
    left_out = [name for name in results[task] if pictures and name not in pictures[0].heatmaps]
    if left_out:
        print(f"{task}: no heatmaps of {', '.join(left_out)} on these images (fresh=true makes new ones)")
    return pictures


def _draw(pictures: Sequence[Picture], path: Path, every_class: bool) -> None:
    """Draw evenly spaced images of the list: a row with the heatmaps of the first class, or one for each class.

    The only heatmap of an explainer that ignores classes is in all rows of its image.
    """
    evenly = [pictures[i] for i in torch.linspace(0, len(pictures) - 1, min(DRAWN, len(pictures))).long()]
    pairs = [(picture, own) for picture in evenly for own in list(picture.classes)[: None if every_class else 1]]
    chosen, titles = zip(*pairs, strict=True)
    names = [name for name in chosen[0].heatmaps if all(name in picture.heatmaps for picture in chosen)]
    maps = {name: [(picture.heatmaps[name], own) for picture, own in pairs] for name in names}
    heatmaps = {
        name: torch.stack([by_class.get(own, next(iter(by_class.values()))) for by_class, own in rows])
        for name, rows in maps.items()
    }
    outlines = [picture.truth for picture in chosen if picture.truth is not None]
    truth = torch.stack(outlines) if len(outlines) == len(chosen) else None
    images = torch.stack([picture.image for picture in chosen])
    figure = draw_heatmaps(images, heatmaps, truth, titles, chosen[0].signed)
    with atomic(path) as unfinished:
        figure.savefig(unfinished, dpi=120)


def _write_overlays(pictures: Sequence[Picture], folder: Path, every_class: bool) -> None:
    """Write `<number>_<image>_<explainer>.png` of the first class, or `<number>_<image>_<explainer>_<class>.png`."""
    # Overlays of an earlier command that are not written again are removed
    earlier = {path for path in folder.glob("*.png") if NUMBERED.match(path.name)}
    for number, picture in enumerate(pictures):
        image = file_name("_".join([*Path(picture.name).parent.parts, Path(picture.name).stem]), 120)
        for explainer, heatmaps in picture.heatmaps.items():
            for own, heatmap in list(heatmaps.items())[: None if every_class else 1]:
                title, signed = f"{own} {picture.classes[own]:.2f}", picture.signed.get(explainer)
                words = title, own, make_title(explainer)
                drawn = draw_annotated(to_pillow(picture.image), heatmap, *words, signed=signed)
                of_class = f"_{file_name(own, 40)}" if every_class and len(heatmaps) > 1 else ""
                path = folder / f"{number:04d}_{image}_{file_name(explainer, 60)}{of_class}.png"
                earlier.discard(path)
                with atomic(path) as unfinished:
                    drawn.save(unfinished)
    for path in earlier:
        path.unlink()


def _notes(content: Mapping[str, Any]) -> list[str]:
    """Lines of the gallery: settings of each task, and the commands that measured it."""
    lines = []
    for task, identity in content.get("identity", {}).items():
        keys = "backbone", "images", "classes", "reference", "levels", "until", "order"
        shown = {key: identity[key] for key in keys if key in identity}
        shown |= {"removals": ", ".join(identity["removals"])} if "removals" in identity else {}
        lines.append(f"{task}: {'; '.join(f'{key} {value}' for key, value in shown.items())}")
    commands = [" ".join(record["command"]) for record in content.get("runs", ())]
    return lines + [re.sub(r"^\S*?(\w+\.py)", r"python \1", command) for command in commands]
