"""Images with masks of several classes, such as ImageNet-S: the class with the largest area is explained."""

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from datamodules.datasets import ImageFiles, check_crop, spread
from datamodules.ilsvrc import imagenet_classes, imagenet_labels
from datamodules.masks import Masks, pairs_of_files, read_ids
from datamodules.truth import Crop, short_side
from explainers.errors import InputError, check_range
from explainers.images.decoding import CorruptImage, stored_size
from explainers.images.listing import several
from explainers.runtime.progress import progress


def class_masks(
    root: str | Path,
    image_size: int,
    images: str = "images",
    masks: str = "masks",
    classes: Sequence[str] | None = None,
    ignored: Sequence[int] = (),
    least_area: float = 0.05,
    imagenet: bool = False,
    crop_fraction: float | None = 0.875,
    limit: int | None = None,
    skip_corrupt: bool = False,
) -> ImageFiles:
    """Images with masks whose pixels hold ids of classes. The label of an image is the class with the largest area.

    Areas are those in the sample, after resize and crop; `truth` holds the pixels of the label. Images in which no
    class is large enough, images without a mask, and masks without an image are left out with a warning.
    For other arguments see `ImageFiles`.

    Args:
        root: folder that holds both folders.
        images: see `masked_images`.
        masks: folder of the masks, see `masked_images` and `read_ids`. Id 0 is no class, id 1 the first of `classes`.
        classes: names of the classes; `None` takes the sorted names of the folders below `images`.
        ignored: further ids that are no class, such as 255, or 1000 in ImageNet-S.
        least_area: smallest area of an object, as a fraction of the sample.
        imagenet: whether `classes` are identifiers such as n01440764, and labels those of ImageNet-1k, 0 to 999.
        limit: see `ImageFiles`; images without a large class count.

    Raises:
        InputError: if a folder is missing, no image has a mask, a mask holds an unknown id, or a class is unknown.
    """
    check_crop(image_size, crop_fraction)
    check_range(0, 1, least_area=least_area)
    folder = Path(root) / images
    pairs = pairs_of_files(Path(root), images, masks)
    names = list(classes) if classes else sorted(path.name for path in folder.iterdir() if path.is_dir())
    largest = LargestClass(
        image_size, short_side(image_size, crop_fraction), len(names), tuple(ignored), least_area, skip_corrupt
    )
    chosen = [pairs[i] for i in spread(len(pairs), limit)]
    ids = largest.of_all(chosen)
    without = [image for (image, _), number in zip(chosen, ids, strict=True) if number == 0]
    area = f"a class on {100 * least_area:g} % of the sample"
    if without:
        warnings.warn(f"left out: {several(without)} without {area}", stacklevel=2)
    large_enough = [(*pair, number) for pair, number in zip(chosen, ids, strict=True) if number]
    if not large_enough:
        raise InputError(f"expected {area} in images of {folder}, got none in {len(chosen)}: lower least_area")
    paths, files, numbers = zip(*large_enough, strict=True)
    labels = imagenet_labels(names, folder) if imagenet else range(len(names))
    of_samples = [labels[number - 1] for number in numbers]
    truth = Masks(files, numbers)
    of_labels = imagenet_classes() if imagenet else names
    return ImageFiles(paths, of_samples, image_size, of_labels, truth, crop_fraction, None, skip_corrupt)


@dataclass(frozen=True)
class LargestClass:
    """Finds the class with the largest area in a sample.

    Args:
        image_size: side of the sample, in pixels.
        short_side: short side of the resized image, in pixels; `None` stretches it to the square.
        classes: number of classes; their ids are 1, 2, ...
        ignored: ids that are no class.
        least_area: smallest area, as a fraction of the sample.
        skip_corrupt: for a file that cannot be decoded, warn instead of raising an error.
    """

    image_size: int
    short_side: int | None
    classes: int
    ignored: tuple[int, ...]
    least_area: float
    skip_corrupt: bool

    def of_all(self, pairs: Sequence[tuple[Path, Path]]) -> list[int | None]:
        """The ids of several samples, see `__call__`; they show their progress."""
        bar = progress("reading masks", len(pairs), "mask", delay=2)
        ids = []
        with ThreadPoolExecutor() as threads:  # decoding releases the interpreter lock
            for number in threads.map(self, pairs):
                ids.append(number)
                bar.update(1)
        bar.close()
        return ids

    def __call__(self, pair: tuple[Path, Path]) -> int | None:
        """The id of the largest class; 0 if none is large enough, `None` for a corrupt image or mask.

        Args:
            pair: files of the image and of its mask.
        """
        try:
            crop = Crop(stored_size(pair[0]), self.short_side, self.image_size)
            ids = read_ids(pair[1])
        except CorruptImage as error:
            if not self.skip_corrupt:
                raise CorruptImage(f"{error}; repair or delete the file, or set skip_corrupt=true") from error
            warnings.warn(f"left out: {error}", stacklevel=2)
            return None
        areas = crop.of_mask(ids).flatten().bincount(minlength=2)
        areas[[0, *(number for number in self.ignored if number < len(areas))]] = 0
        if len(areas) > self.classes + 1 and areas[self.classes + 1 :].any():
            raise InputError(
                f"{pair[1]}: expected ids from 0 to {self.classes}, one for each class, got {int(areas.nonzero()[-1])}:"
                " name all classes (classes), or ignore the id (ignored)"
            )
        largest = int(areas.argmax())
        return largest if areas[largest] >= max(1, self.least_area * self.image_size**2) else 0
