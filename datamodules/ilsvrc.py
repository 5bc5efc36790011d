"""Images with boxes around their objects: in a list that names them, or as ILSVRC 2012 is published, in XML or CSV."""

import csv
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack
from xml.etree import ElementTree

from timm.data import ImageNetInfo

from datamodules.datasets import ImageFiles, Reading, check_below, read_json, spread
from datamodules.truth import Box, Boxes, Size
from explainers.errors import InputError
from explainers.images.listing import existing_folder, list_images, several
from explainers.images.transform import ImageTransform
from explainers.runtime.progress import progress

BOXES = ("annotations.json", "LOC_val_solution.csv", "Annotations/CLS-LOC/val", "ILSVRC/Annotations/CLS-LOC/val", "val")
"""Where boxes are looked for below the root; a folder counts if it holds XML files."""

IMAGES = ("images", "Data/CLS-LOC/val", "ILSVRC/Data/CLS-LOC/val", "val", ".")
"""Where images are looked for below the root; a folder with the boxes does not count."""


class Annotation(NamedTuple):
    """The class of an image, and its boxes in pixels of an image of `size`; `None` stands for the stored size."""

    wnid: str
    boxes: list[Box]
    size: Size | None


def annotated_images(
    root: str | Path,
    transform: ImageTransform,
    annotations: str = "annotations.json",
    classes: str | None = None,
    **reading: Unpack[Reading],
) -> ImageFiles:
    """Images with annotated object boxes: every sample has a `truth` mask. For other arguments see `ImageFiles`.

    Args:
        root: folder to which all file names are relative; files outside it are refused.
        annotations: JSON file with a list of {"file": name, "label": class index, "boxes_xyxy": [[left, top, right,
            bottom], ...]}; boxes are in pixels of the stored image.
        classes: JSON file whose "wnids" are the class names; `None` leaves the classes without names.
    """
    folder = existing_folder(root, f"with {annotations}")
    rows = read_json(folder / annotations)
    try:
        paths = [folder / row["file"] for row in rows]
        labels = [int(row["label"]) for row in rows]
        boxes = [[(float(x0), float(y0), float(x1), float(y1)) for x0, y0, x1, y1 in row["boxes_xyxy"]] for row in rows]
        if not rows:
            raise ValueError("an empty list")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f'{folder / annotations}: expected a list of {{"file": name, "label": class, "boxes_xyxy": [[left, top,'
            f" right, bottom], ...]}}, got something else ({error!r}); correct the file"
        ) from error
    check_below(folder, paths, folder / annotations)
    names = read_json(folder / classes)["wnids"] if classes else ()
    return ImageFiles(paths, labels, transform, names, Boxes(boxes), **reading)


def imagenet_boxes(
    root: str | Path,
    transform: ImageTransform,
    boxes: str | None = None,
    images: str | None = None,
    **reading: Unpack[Reading],
) -> ImageFiles:
    """Images of ILSVRC 2012 with their boxes: every sample has a `truth` mask. The label is the class of its boxes.

    Images without boxes, and boxes without an image, are left out with a warning. Samples are sorted by file name.
    For other arguments see `ImageFiles`.

    Args:
        root: folder to which the others are relative.
        boxes: folder of XML files; or LOC_val_solution.csv, whose boxes are in pixels of the stored images; or a .json
            file of `annotated_images`, which names the images itself. `None` takes the first of `BOXES` that exists.
        images: folder of the images, in subfolders or not. `None` takes the first of `IMAGES` that exists.

    Raises:
        InputError: if boxes or images are missing, or a file names no box or an unknown class.
    """
    folder = existing_folder(root, "with images and boxes of ILSVRC 2012")
    source = find_boxes(folder, boxes)
    if source.suffix == ".json":
        classes = "classes.json" if (folder / "classes.json").is_file() else None
        return annotated_images(folder, transform, str(source.absolute()), classes, **reading)
    of_image = {path.stem: path for path in list_images([find_images(folder, images, source)])[0]}
    of_boxes: Any = {path.stem: path for path in source.glob("*.xml")} if source.is_dir() else read_csv(source)
    names = names_in_both(of_image, of_boxes, source)
    chosen = [names[i] for i in spread(len(names), reading.pop("limit", None))]
    known = [of_boxes[name] for name in chosen]
    annotations = read_xml_files(known) if source.is_dir() else known
    sizes = [one.size for one in annotations if one.size is not None]
    truth = Boxes([one.boxes for one in annotations], sizes or None)
    labels = imagenet_labels([one.wnid for one in annotations], source)
    paths = [of_image[name] for name in chosen]
    return ImageFiles(paths, labels, transform, imagenet_classes(), truth, **reading)


def find_boxes(folder: Path, named: str | None) -> Path:
    """The file or folder of boxes below a folder; `None` as its name takes the first of `BOXES` that exists."""
    places = [folder / name for name in (BOXES if named is None else (named,))]
    for place in places:
        if place.is_file() or any(place.glob("*.xml")):
            return place
    looked_for = ", ".join(BOXES[:2]) + f" or XML files in {', '.join(BOXES[2:])}" if named is None else named
    raise InputError(
        f"expected boxes of ILSVRC 2012 in {folder}, got none: there is no {looked_for}; put them there, or set root"
        " and boxes (in eval.py, tasks.imagenet_val.data.test.boxes=...)"
    )


def find_images(folder: Path, named: str | None, boxes: Path) -> Path:
    """The folder of images below a folder; `None` as its name takes the first of `IMAGES` that exists."""
    places = [folder / name for name in (IMAGES if named is None else (named,))]
    place = next((place for place in places if place.is_dir() and place != boxes), places[0])
    return existing_folder(place, "of images of ILSVRC 2012")


def names_in_both(of_image: Mapping[str, Path], of_boxes: Mapping[str, Any], source: Path) -> list[str]:
    """The sorted names of images that have boxes; warn of images and boxes that have no other half."""
    both = sorted(of_image.keys() & of_boxes.keys())
    if not both:
        first = next(iter(sorted(of_image)), "no image")
        raise InputError(
            f"expected images that {source} names, such as {min(of_boxes, default='none')}, got {len(of_image)} others"
            f" ({first}): set images to their folder"
        )
    images = [of_image[name] for name in sorted(of_image.keys() - of_boxes.keys())]
    if images:
        warnings.warn(f"left out: {several(images)} without boxes in {source}", stacklevel=3)
    alone = [Path(name) for name in sorted(of_boxes.keys() - of_image.keys())]
    if alone:
        warnings.warn(f"left out: the boxes of {several(alone)}, which {source} names and no image has", stacklevel=3)
    return both


def imagenet_classes() -> list[str]:
    """The identifiers of ImageNet's 1000 classes in the order of their labels, which is sorted."""
    return ImageNetInfo("imagenet-1k").label_names()


def imagenet_labels(wnids: Sequence[str], source: Path) -> list[int]:
    """The labels 0 to 999 of classes of ImageNet-1k, given identifiers such as n01440764 and where they come from."""
    known = {wnid: label for label, wnid in enumerate(imagenet_classes())}
    unknown = sorted(set(wnids) - known.keys())
    if unknown:
        raise InputError(
            f"expected identifiers of ImageNet's 1000 classes, such as n01440764, in {source}, got"
            f" {', '.join(unknown[:3])}; take the files of ILSVRC 2012"
        )
    return [known[wnid] for wnid in wnids]


def read_csv(path: Path) -> dict[str, Annotation]:
    """Read LOC_val_solution.csv: name of an image → its class and boxes."""
    annotations = {}
    with open(path, newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if number == 1 and row[:1] == ["ImageId"]:
                continue
            try:
                name, words = row[0], row[1].split()
                if not words:
                    raise ValueError("no box")
                boxes = [numbers(words[i + 1 : i + 5]) for i in range(0, len(words), 5)]
                annotations[name] = annotation(words[::5], boxes, None)
            except (IndexError, ValueError) as error:
                raise InputError(
                    f"{path}, line {number}: expected <image>,<wnid> <left> <top> <right> <bottom> ..., got"
                    f" {','.join(row)[:80]} ({error}); correct the file"
                ) from error
    return annotations


def read_xml_files(paths: Sequence[Path]) -> list[Annotation]:
    """Read the class and the boxes of images from XML files; raises an InputError if files have no box."""
    annotations = []
    with progress("reading boxes", len(paths), "file", delay=2) as bar:
        for path in paths:
            annotations.append(read_xml(path))
            bar.update(1)
    empty = [path for path, one in zip(paths, annotations, strict=True) if not one.boxes]
    if empty:
        raise InputError(
            f"expected boxes in each XML file of {empty[0].parent}, got none in {several(empty)}; replace these files,"
            " or delete them to leave out their images"
        )
    return annotations


def read_xml(path: Path) -> Annotation:
    """Read the class, the boxes and the size of an image from an XML file of ILSVRC; it may have no boxes."""
    try:
        root = ElementTree.parse(path).getroot()
        size = int(child(root, "size/height")), int(child(root, "size/width"))
        objects = root.findall("object")
        sides = ("xmin", "ymin", "xmax", "ymax")
        boxes = [numbers([child(one, f"bndbox/{side}") for side in sides]) for one in objects]
        if min(size) < 1:
            raise ValueError(f"a size of {size}")
        return annotation([child(one, "name") for one in objects], boxes, size)
    except (ElementTree.ParseError, ValueError) as error:
        raise InputError(
            f"{path}: expected <size>, and <object> with <name> and <bndbox>, as in ILSVRC, got {error}; replace the"
            " file"
        ) from error


def child(node: ElementTree.Element, path: str) -> str:
    """The text of an element below a node; a ValueError if there is none."""
    text = node.findtext(path)
    if text is None:
        raise ValueError(f"no <{path}>")
    return text.strip()


def annotation(wnids: Sequence[str], boxes: Sequence[Box], size: Size | None) -> Annotation:
    """What is known of an image whose boxes have these classes; a ValueError if they are not one class."""
    if len(set(wnids)) > 1:
        raise ValueError(f"objects of {len(set(wnids))} classes")
    return Annotation(wnids[0] if wnids else "", list(boxes), size)


def numbers(words: Sequence[str]) -> Box:
    """Left, top, right and bottom as numbers; a ValueError for other words, or another order."""
    left, top, right, bottom = map(float, words)
    if left > right or top > bottom:
        raise ValueError(f"a box {' '.join(words)}")
    return left, top, right, bottom
