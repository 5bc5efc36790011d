"""Checks .beton files, which FFCV reads, and reads the description that `write_beton` puts beside them."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.fingerprints import digest
from datamodules.places import INSTALL_FFCV, write_command
from explainers.errors import InputError
from explainers.saved.files import atomic

RGB_IMAGE, INT = 2, 1  # ffcv.types.TYPE_ID_HANDLER


@contextlib.contextmanager
def keep_torch_threads() -> Iterator[None]:
    """Restore torch's number of threads, because FFCV sets it to its own, and its import sets it to 1."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def require_ffcv() -> None:
    """Raise an InputError with installation advice if FFCV, which is optional, is missing."""
    try:
        with keep_torch_threads():
            import ffcv  # noqa: F401
    except ImportError as error:
        raise InputError(f"FFCV is not installed ({error}): {INSTALL_FFCV}") from error


def check_beton(path: Path, size: tuple[int, int] | None = None) -> int:
    """Count the samples of a .beton file.

    Args:
        size: height and width of its images, in pixels; `None` allows all.

    Raises:
        InputError: if the file is missing, damaged or of other images, because FFCV would crash on it or hang.
    """
    if not path.is_file():
        raise InputError(f"expected a .beton file {path}, got none; write it: {write_command(path)}")
    require_ffcv()
    try:
        images = inspect_beton(path)
    except ValueError as error:
        raise InputError(
            f"{path} is not a complete .beton file of images and labels: {error}; write it again: {write_command(path)}"
        ) from error
    if size and ((images["height"] != size[0]) | (images["width"] != size[1])).any():
        got = f"{images['height'][0]} × {images['width'][0]}"
        raise InputError(
            f"{path}: expected images of {size[0]} × {size[1]} pixels, as data.transform shows them, got {got}; write"
            f" it again: {write_command(path)}"
        )
    return len(images)


def inspect_beton(path: Path) -> np.ndarray:
    """Read height, width and place of every image; a ValueError describes the first problem."""
    from ffcv import types

    size = path.stat().st_size
    if size < types.HeaderType.itemsize:
        raise ValueError(f"expected a header of {types.HeaderType.itemsize} bytes, got a file of {size}")
    header = np.fromfile(path, types.HeaderType, count=1)[0]
    names = "version", "page_size", "num_samples", "num_fields", "alloc_table_ptr"
    version, page, samples, num_fields, table = (int(header[name]) for name in names)
    if version != types.CURRENT_VERSION or page < 2 or page & (page - 1):
        wanted = f"version {types.CURRENT_VERSION}, pages of 2^n bytes"
        raise ValueError(f"expected {wanted}, got {version}, pages of {page}")
    cut = f"expected {samples} samples and a table of them at byte {table}, got a file of {size} bytes"
    fields_end = types.HeaderType.itemsize + num_fields * types.FieldDescType.itemsize
    if not fields_end < table < size or (size - table) % types.ALLOC_TABLE_TYPE.itemsize:
        raise ValueError(cut)
    if table % page:
        raise ValueError(f"expected whole pages of {page} bytes, got a table at byte {table}")
    fields = np.fromfile(path, types.FieldDescType, count=num_fields, offset=types.HeaderType.itemsize)
    kinds = {bytes(field["name"]).rstrip(b"\0").decode("ascii", "replace"): int(field["type_id"]) for field in fields}
    known = all(types.TYPE_ID_HANDLER.get(kind) for kind in kinds.values())
    if not known or (kinds.get("image"), kinds.get("label"), kinds.get("index", INT)) != (RGB_IMAGE, INT, INT):
        raise ValueError(f"expected the fields image (kind {RGB_IMAGE}) and label (kind {INT}), got {kinds}")
    sample = types.get_metadata_type(types.get_handlers(fields))
    if not 0 < samples * sample.itemsize <= table - fields_end:
        raise ValueError(cut)
    stored = np.fromfile(path, sample, count=samples, offset=fields_end)[f"f{list(kinds).index('image')}"]
    check_places(stored, np.fromfile(path, types.ALLOC_TABLE_TYPE, offset=table), table)
    return stored


def check_places(images: np.ndarray, regions: np.ndarray, end: int) -> None:
    """Raise a ValueError unless each image has a region of its size, and all regions end before byte `end`."""
    outside = int(((regions["ptr"] > end) | (regions["size"] > end - regions["ptr"])).sum())
    if outside:
        raise ValueError(f"expected all data before byte {end}, got {outside} regions that end after it")
    regions = regions[np.argsort(regions["ptr"])]
    region = np.searchsorted(regions["ptr"], images["data_ptr"]).clip(max=len(regions) - 1)
    wrong = regions["ptr"][region] != images["data_ptr"]
    raw_size = 3 * images["height"].astype(np.uint64) * images["width"]
    wrong |= (raw_size == 0) | (images["mode"] > 1) | ((images["mode"] == 1) & (raw_size != regions["size"][region]))
    if wrong.any():
        raise ValueError(f"expected stored pixels for every image, got {int(wrong.sum())} images without")


def tables_hash(path: Path) -> str:
    """SHA-256 of everything in a .beton except pixels: header, fields, labels, and sizes and places of the images."""
    from ffcv import types

    header = np.fromfile(path, types.HeaderType, count=1)[0]
    fields = np.fromfile(path, types.FieldDescType, count=int(header["num_fields"]), offset=types.HeaderType.itemsize)
    sample = types.get_metadata_type(types.get_handlers(fields))
    with open(path, "rb") as file:
        start = file.read(types.HeaderType.itemsize + fields.nbytes + int(header["num_samples"]) * sample.itemsize)
        file.seek(int(header["alloc_table_ptr"]))
        return digest(start, file.read())


def description_file(path: Path) -> Path:
    """The file beside a .beton that names its classes."""
    return path.with_name(f"{path.name}.json")


def identity(path: Path) -> dict[str, Any]:
    """What distinguishes a .beton from others, computed without reading its images."""
    return {"samples": check_beton(path), "bytes": path.stat().st_size, "tables": tables_hash(path)}


def describe(
    unfinished: Path, path: Path, classes: Sequence[str], source: Mapping[str, str], settings: Mapping[str, Any]
) -> None:
    """Write the description of a .beton that is complete, but still has its temporary name.

    Args:
        unfinished: the .beton.
        path: its final name.
        classes: class names in the order of their labels.
        source: fingerprint of the image files.
        settings: how they were written.
    """
    content = identity(unfinished) | {"classes": list(classes), "source": dict(source), "settings": dict(settings)}
    with atomic(description_file(path), alone=True) as file:
        file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def read_description(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Class names of a .beton in the order of their labels, and its transform; both empty if it has no description.

    Raises:
        InputError: if the description is damaged or belongs to another file.
    """
    beside = description_file(path)
    if not beside.exists():
        return [], {}
    own = identity(path)
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
        classes = [str(name) for name in content["classes"]]
        transform = dict(content["settings"]["transform"])
        described = {name: content[name] for name in own}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"expected {beside} as write_beton writes it, got something else; write it again: {write_command(path)}"
        ) from error
    if described != own:
        raise InputError(
            f"expected {path} and {beside} to be written together, got the description of another file; write both"
            f" again: {write_command(path)}"
        )
    return classes, transform
