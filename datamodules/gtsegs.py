"""Unpack ImageNet-Segmentation (Guillaumin et al., 2014), the file gtsegs_ijcv.mat, to images and masks.

    python -m datamodules.gtsegs gtsegs_ijcv.mat data/imagenet_segmentation

writes images/<number>_<name>.png and masks/<number>_<name>.png, which tasks=[imagenet_segmentation] reads. It needs
h5py (pip install h5py).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explainers.errors import InputError
from explainers.images.masks import find_object
from explainers.runtime.progress import progress
from explainers.saved.files import atomic, file_name


def unpack(path: Path, folder: Path) -> int:
    """Write the images and masks of gtsegs_ijcv.mat to a folder, and return their number. Existing files are replaced.

    Raises:
        InputError: if the file is another one.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            count = len(file["value/img"])
            with progress("unpacking", count, "image") as bar:
                for name, image, mask in samples(file):
                    for kind, pixels in (("images", image), ("masks", mask)):
                        with atomic(folder / kind / f"{name}.png") as unfinished:
                            Image.fromarray(pixels).save(unfinished, compress_level=1)
                    bar.update(1)
    except (OSError, KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"expected gtsegs_ijcv.mat, got {path}, another file ({error}); download it again") from error
    return count


def samples(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the name, the image (H, W, 3) and the mask (H, W) of each image; MATLAB stores the axes in reverse.

    Args:
        file: the open HDF5 file. `value/img` refers to images (3, W, H), `value/gt` to cells that refer to masks
            (W, H), and `value/id`, if there is one, to names such as n00007846_6247.
    """
    for number, (image, cell) in enumerate(zip(file["value/img"], file["value/gt"], strict=True)):
        mask = file[file[cell[0]][0, 0]][()].T
        name = "".join(map(chr, file[file["value/id"][number, 0]][()].flatten())) if "id" in file["value"] else ""
        pixels = file[image[0]][()].transpose(2, 1, 0)
        if pixels.dtype != np.uint8 or pixels.shape != (*mask.shape, 3):
            raise ValueError(f"an image of {pixels.dtype} {pixels.shape} with a mask {mask.shape}")
        stem = file_name(f"{number:04d}_{name}".rstrip("_"))
        yield stem, pixels, find_object(mask, stem)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Unpack ImageNet-Segmentation to images and masks.")
    parser.add_argument("file", type=Path, help="gtsegs_ijcv.mat")
    parser.add_argument("folder", type=Path, help="folder of the images and masks, such as data/imagenet_segmentation")
    options = parser.parse_args(arguments)
    try:
        count = unpack(options.file, options.folder)
    except (InputError, OSError, ImportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{options.folder}: {count} images with masks")


if __name__ == "__main__":
    main()
