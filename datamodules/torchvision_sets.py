"""Data sets that torchvision reads, by name: batches with names of classes, and a test split where none is official."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from filelock import FileLock
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, CIFAR100, DTD, GTSRB, MNIST, SUN397, SVHN, EuroSAT, ImageFolder, StanfordCars

from datamodules.datasets import ImageFiles, Sample, choose_transform, spread
from datamodules.fingerprints import digest
from datamodules.images import Images, Loading
from explainers.errors import InputError
from explainers.images.decoding import convert_to_rgb
from explainers.images.transform import ImageTransform


def named(classes: str) -> tuple[str, ...]:
    """Names of classes in the order of their labels, with commas between them."""
    return tuple(classes.split(", "))


DIGIT_NAMES = tuple("0123456789")

LAND_USES = named(
    "annual crops, forest, low natural vegetation, highway, industrial buildings, pasture, permanent crops, "
    "residential buildings, river, sea or lake"
)
"""Classes of EuroSAT, which torchvision does not name."""

TRAFFIC_SIGNS = named(
    "speed limit 20 km/h, speed limit 30 km/h, speed limit 50 km/h, speed limit 60 km/h, speed limit 70 km/h, "
    "speed limit 80 km/h, end of speed limit 80 km/h, speed limit 100 km/h, speed limit 120 km/h, no overtaking, "
    "no overtaking by trucks, right of way at the next crossing, priority road, give way, stop, no vehicles, "
    "no trucks, no entry, danger, curve to the left ahead, curve to the right ahead, several curves ahead, "
    "uneven road, slippery road, road narrows on the right, road works, traffic lights ahead, pedestrians, "
    "children, cyclists crossing, snow or ice, wild animals, end of all restrictions, turn right ahead, "
    "turn left ahead, straight ahead only, straight ahead or right, straight ahead or left, pass on the right, "
    "pass on the left, roundabout, end of no overtaking, end of no overtaking by trucks"
)
"""Classes of GTSRB, which torchvision does not name."""


@dataclass(frozen=True)
class Stored:
    """How torchvision's class reads a data set.

    Args:
        reader: torchvision's class.
        place: where the files are, for messages.
        classes: names of the classes in the order of their labels; empty if torchvision has names.
        below: folder below the common root that `reader` takes as its root.
        source: page to download it from, if torchvision cannot.
    """

    reader: Callable[..., Any]
    place: str
    classes: Sequence[str] = ()
    below: str = ""
    source: str = ""


RESISC45_PAGE = "https://www.tensorflow.org/datasets/catalog/resisc45"
DATA_SETS = {
    "CIFAR10": Stored(CIFAR10, "cifar-10-batches-py"),
    "CIFAR100": Stored(CIFAR100, "cifar-100-python"),
    "DTD": Stored(DTD, "dtd/dtd"),
    "EuroSAT": Stored(EuroSAT, "eurosat/2750", LAND_USES),
    "GTSRB": Stored(GTSRB, "gtsrb/GTSRB", TRAFFIC_SIGNS),
    "MNIST": Stored(MNIST, "MNIST/raw", DIGIT_NAMES),
    "RESISC45": Stored(ImageFolder, "NWPU-RESISC45", below="NWPU-RESISC45", source=RESISC45_PAGE),
    "StanfordCars": Stored(StanfordCars, "stanford_cars", source="https://github.com/pytorch/vision/issues/7545"),
    "SUN397": Stored(SUN397, "SUN397"),
    "SVHN": Stored(SVHN, "svhn", DIGIT_NAMES, below="svhn"),
}
"""torchvision's name → how it is read. RESISC45 is a folder of classes, which torchvision reads as any other."""

HELD_OUT = 5
"""Without an official test split, every fifth image is a test image: of the files, sorted by class and name."""


class ImageArrays(Dataset[Sample]):
    """Small images in memory, as a model sees them.

    Args:
        pixels: uint8, (B, H, W) grey or (B, H, W, 3) RGB.
        labels: class index of every image.
        classes: class names in the order of their labels.
        chosen: positions of the samples in `pixels`.
        transform: how images become samples.
    """

    def __init__(
        self,
        pixels: np.ndarray,
        labels: Sequence[int],
        classes: Sequence[str],
        chosen: Sequence[int],
        transform: ImageTransform,
    ) -> None:
        self.pixels = pixels
        self.chosen = chosen
        self.transform = transform
        self.classes = list(classes)
        self.labels = torch.tensor([int(labels[i]) for i in chosen])  # int64, one for each sample

    def fingerprint(self) -> dict[str, str]:
        """A hash for each entry of the samples: equal for equal contents in the same order."""
        pixels = (self.pixels[i].tobytes() for i in self.chosen)
        return {"image": digest(asdict(self.transform), *pixels), "label": digest(self.labels.tolist())}

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Sample:
        image = self.transform(convert_to_rgb(Image.fromarray(self.pixels[self.chosen[index]])))
        return {"image": image, "label": int(self.labels[index]), "index": index}


def torchvision_images(
    root: str | Path,
    name: str,
    split: str,
    transform: ImageTransform,
    crop_fraction: float | None = None,
    download: bool = False,
    limit: int | None = None,
    half: int | None = None,
) -> ImageArrays | ImageFiles:
    """Read a split of a data set of torchvision, as upright RGB images.

    Of a data set without validation images, `val` are the test images. `RESISC45`, `EuroSAT` and `SUN397` have no
    official splits in torchvision: see `HELD_OUT`. For other arguments see `TorchvisionImages`.

    Args:
        split: train, val or test.
        limit: maximum number of images, spread evenly over the split; `None` takes all.
        half: see `image_folder`.

    Raises:
        InputError: if the name is unknown, or the data set is missing or incomplete.
    """
    if name not in DATA_SETS:
        raise InputError(f"expected one of {', '.join(DATA_SETS)} for data.name, got {name}")
    stored = DATA_SETS[name]
    official = "val" if name == "DTD" else "test"
    data = open_stored(root, name, official if split == "val" else split, download)
    images, labels = images_and_labels(data)
    chosen = list(range(len(labels)))
    if not split_options(stored.reader, split):
        chosen = [i for i in chosen if (i % HELD_OUT == HELD_OUT - 1) == (split != "train")]
    if half is not None:
        chosen = chosen[half::2]
    chosen = [chosen[i] for i in spread(len(chosen), limit)]
    classes = stored.classes or [readable_scene(each) for each in data.classes]
    if isinstance(images, np.ndarray):
        return ImageArrays(images, labels, classes, chosen, choose_transform(transform, crop_fraction))
    paths = [images[i] for i in chosen]
    return ImageFiles(paths, [int(labels[i]) for i in chosen], transform, classes, crop_fraction=crop_fraction)


def split_options(reader: Callable[..., Any], split: str) -> dict[str, Any]:
    """The argument by which a class of torchvision takes a split; empty if it has no splits.

    >>> split_options(MNIST, "test"), split_options(GTSRB, "test"), split_options(EuroSAT, "test")
    ({'train': False}, {'split': 'test'}, {})
    """
    options = {"train": split == "train", "split": split}
    return {key: value for key, value in options.items() if key in inspect.signature(reader).parameters}


def open_stored(root: str | Path, name: str, split: str, download: bool) -> Any:
    """Build torchvision's own data set of a split, whose files it reads, and downloads only if it is asked to."""
    stored = DATA_SETS[name]
    own_root = Path(root) / stored.below
    options = split_options(stored.reader, split)
    downloads = download and not stored.source
    if downloads:
        own_root.mkdir(parents=True, exist_ok=True)
        options["download"] = True
    try:  # one process downloads, the others wait
        with FileLock(own_root / f".{name}.lock") if downloads else nullcontext():
            return stored.reader(str(own_root), **options)
    except (RuntimeError, OSError) as error:
        if downloads:
            raise InputError(f"expected to download {name} to {own_root}, got an error: {error}") from error
        advice = f"download it from {stored.source}, as torchvision cannot" if stored.source else ""
        raise InputError(
            f"expected the {split} images of {name} in {Path(root) / stored.place}, got none or a part of them:"
            f" correct data.root, or {advice or 'let torchvision download them with data.download=true'}"
        ) from error


def images_and_labels(data: Any) -> tuple[np.ndarray | list[str], Sequence[int]]:
    """What a data set of torchvision holds: uint8 arrays (B, H, W[, 3]) or files, and the labels."""
    if hasattr(data, "data"):  # CIFAR, MNIST and SVHN
        pixels = np.asarray(data.data)
        channels_last = pixels.transpose(0, 2, 3, 1) if isinstance(data, SVHN) else pixels
        return channels_last, list(data.labels if isinstance(data, SVHN) else data.targets)
    if hasattr(data, "_image_files"):  # DTD and SUN397, which lists its files in no order
        rows = list(zip(map(str, data._image_files), data._labels, strict=True))
        rows = sorted(rows) if isinstance(data, SUN397) else rows
    else:  # GTSRB and StanfordCars; EuroSAT and other folders
        rows = data._samples if hasattr(data, "_samples") else data.samples
    return [str(path) for path, _ in rows], [label for _, label in rows]


def readable_scene(name: str) -> str:
    """The name of a class of SUN397 in the order of English; other names stay.

    >>> readable_scene("apse/indoor"), readable_scene("polka-dotted")
    ('indoor apse', 'polka-dotted')
    """
    return " ".join(reversed(name.split("/")))


class TorchvisionImages(Images):
    """Batches from a data set that torchvision reads.

    For other arguments see `Images`.

    Args:
        root: folder of all data sets of torchvision.
        name: one of `DATA_SETS`.
        transform: how images become samples of H × W pixels.
        crop_fraction: see `datasets.choose_transform`.
        download: let torchvision download the data set if it is missing.
        limit: split → maximum number of images, spread evenly; `None` takes all.
        halve: if `val` and `test` are the same images, each takes every second of them.
    """

    def __init__(
        self,
        root: str,
        name: str,
        transform: ImageTransform,
        crop_fraction: float | None = None,
        download: bool = False,
        limit: Mapping[str, int | None] | None = None,
        halve: bool = False,
        templates: Sequence[str] = (),
        **loading: Unpack[Loading],
    ) -> None:
        halves = {"val": 0, "test": 1} if halve and name != "DTD" else {}
        build = partial(torchvision_images, root, name, crop_fraction=crop_fraction, download=download)
        train, val, test = (
            partial(build, split, transform, limit=(limit or {}).get(split), half=halves.get(split))
            for split in ("train", "val", "test")
        )
        super().__init__(train, val, test, templates, **loading)
