"""One HTML page of an audit: groups of evidence, photos with and without them, the command that takes them out."""

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from explainers.auditing.audit import FILES, SUSPICIOUS, Audit, Example, Group, mismatch
from explainers.report.html_pages import encode_bytes, fill_page, photo_url, round_numbers

PAGE = "audit.html"
"""File of the page in the folder of an audit."""

STORED = 1000
"""Most photos in a page, each of about 13 kB at 224 × 224 pixels."""

NAMED = 4  # most classes that the sentence at the top names
DRAWN = {"hidden", "random", "positions", "examples", "without"}  # fields of groups that the page gets in another form


def audit_html(audit: Audit, photos: Mapping[int, Tensor]) -> str:
    """Make a page of crops, numbers and reasons of groups, which opens without server and network.

    Args:
        audit: its `about["command"]` holds the words of the command that made it.
        photos: number of an image → what the model saw, uint8 (3, H, W). Examples without a photo are not shown, nor
            more than `STORED` photos: those of the most suspicious groups.

    Returns:
        HTML, in ASCII.
    """
    shown = _choose_examples(audit, photos)
    places = {number: place for place, number in enumerate(shown)}
    groups = [_group(group, places) for group in audit.groups]
    command = shlex.join(audit.about["command"])
    notes = audit.about | {"command": command} | audit.numbers
    content = {
        "id": audit.id,
        "title": f"Audit of {audit.about['model']}",
        "summary": summarise_audit(audit),
        "measured": _measured(audit.numbers, groups),
        "notes": [[name, _written(value)] for name, value in notes.items()],
        "command": command,
        "classes": audit.classes,
        "shape": list(audit.shape),
        "threshold": SUSPICIOUS,
        "images": [*shown.values()],
        "groups": groups,
    }
    return fill_page("audit", ["crops.js", "group.js", "audit.js"], content)


def load_audit(folder: str | Path) -> Audit:
    """Read the audit in a folder; an InputError unless the page there is its own."""
    audit, page = Audit.load(folder), Path(folder) / PAGE
    if not page.is_file() or f'"id":"{audit.id}"' not in page.read_text(encoding="utf-8", errors="replace"):
        raise mismatch(folder, FILES[0], PAGE)
    return audit


def summarise_audit(audit: Audit) -> str:
    """The result in a sentence: how many groups there are, and which are suspicious."""
    suspicious: dict[int, list[str]] = {}
    for group in audit.suspicious:
        suspicious.setdefault(group.class_index, []).append(str(group.index))
    classes = len({group.class_index for group in audit.groups})
    start = f"{_count(len(audit.groups), 'group')} in {_count(classes, 'class', 'classes')}; "
    if not suspicious:
        most = f": the most is {audit.groups[0].suspicion:.2f}, of group 0" if audit.groups else ""
        return f"{start}no group is suspicious{most}."
    number = len(audit.suspicious)
    named = [_named(several, audit.classes[y]) for y, several in [*suspicious.items()][:NAMED]]
    if more := len(suspicious) - len(named):
        named.append(f"and those of {_count(more, 'more class', 'more classes')}")
    return f"{start}{number} {'is' if number == 1 else 'are'} suspicious: {'; '.join(named)}."


def _named(numbers: list[str], name: str) -> str:
    *others, last = numbers
    return f"{'groups ' + ', '.join(others) + ' and ' if others else 'group '}{last} of {name}"


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _measured(numbers: Mapping[str, Any], groups: list[dict[str, Any]]) -> str:
    accuracy, pictured = numbers["accuracy"], sum(bool(group["examples"]) for group in groups)
    right = "without labels" if accuracy is None else f"{accuracy:.1%} are predicted right"
    kept = f" This page has photos of {pictured:,} of {len(groups):,} groups." if pictured < len(groups) else ""
    return f"{_count(numbers['images'], 'image')}, {right}.{kept}"


def _choose_examples(audit: Audit, photos: Mapping[int, Tensor]) -> dict[int, dict[str, Any]]:
    """Number → example of the most suspicious groups, as the page shows it."""
    chosen: dict[int, dict[str, Any]] = {}
    for group in audit.groups:
        more = {each.number: each for each in (*group.examples, *group.without) if each.number not in chosen}
        if len(chosen) + len(more) > STORED:
            break
        for number, each in more.items():
            with suppress(KeyError):  # a photo that cannot be read any more
                shown = {"name": each.name, "label": each.label, "predicted": each.predicted}
                chosen[number] = shown | {"url": photo_url(photos[number])}
    return chosen


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(round_numbers(value), ensure_ascii=False)


def _group(group: Group, places: Mapping[int, int]) -> dict[str, Any]:
    """A group for the page, with the places of its examples in the list of images."""
    return {name: round_numbers(value) for name, value in vars(group).items() if name not in DRAWN} | {
        "alarm": group.is_alarm,
        "effects": [effect and round_numbers(vars(effect)) for effect in (group.hidden, group.random)],
        "positions": _quantise(group.positions),
        "examples": _shown(group.examples, places),
        "without": _shown(group.without, places),
    }


def _shown(examples: tuple[Example, ...], places: Mapping[int, int]) -> list[dict[str, Any]]:
    return [{"image": places[each.number], "patches": each.patches} for each in examples if each.number in places]


def _quantise(positions: tuple[tuple[float, ...], ...]) -> str:
    """Shares at all places, 0 to 255 for the largest: base64 of bytes, row by row."""
    shares = torch.tensor(positions)
    return encode_bytes((255 * shares / shares.max()).round().byte())
