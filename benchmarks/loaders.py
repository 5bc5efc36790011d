"""Speed of the torch loader and of the FFCV loader, measured in one run.

    python benchmarks/loaders.py                               # generated JPEGs of 500 x 375 pixels
    python benchmarks/loaders.py --root data/imagenet/val --limit 5000

Both loaders give the same batches. The first epoch of each is not counted, because it starts processes, compiles with
Numba and fills the file cache. Counted epochs alternate between the loaders, so that other work on the machine slows
both alike.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from datamodules.ffcv import FFCV
from datamodules.folders import image_folder
from datamodules.images import Images
from datamodules.write_beton import write_beton
from explainers.images.transform import ImageTransform


def generate_images(root: Path, count: int) -> None:
    """Write `count` JPEGs of 500 x 375 pixels, ImageNet's average size, with detail at several scales."""
    for i in range(count):
        random = np.random.default_rng(i)
        image = np.zeros((375, 500, 3))
        for side in (3, 12, 48, 192):
            noise = Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))
            image += np.asarray(noise.resize((500, 375), Image.Resampling.BICUBIC)) / 4
        path = root / f"class{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image.astype(np.uint8)).save(path, quality=95)


def images_per_second(loader: Iterable[dict[str, torch.Tensor]]) -> float:
    """Speed of a loader in one whole epoch."""
    start = time.perf_counter()
    count = sum(len(batch["image"]) for batch in loader)
    return count / (time.perf_counter() - start)


def compare(folder: Path, beton: Path, transform: ImageTransform, options: argparse.Namespace) -> None:
    """Time both loaders on the same images, and print their speeds."""
    settings = {"batch_size": options.batch_size, "num_workers": options.workers}
    data = partial(image_folder, folder, transform, limit=options.limit)
    loaders: dict[str, Iterable[dict[str, torch.Tensor]]] = {
        "torch": Images(val=data, **settings).val_dataloader(),
        "FFCV": FFCV(val=str(beton), transform=transform, **settings).val_dataloader(),
    }
    warm_up = {name: images_per_second(loader) for name, loader in loaders.items()}
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(options.epochs):
        for name, loader in loaders.items():
            rates[name].append(images_per_second(loader))
    for name, speeds in rates.items():
        print(
            f"{name:>5}: {median(speeds):7.0f} images/s, median of {options.epochs} epochs"
            f" ({min(speeds):.0f} to {max(speeds):.0f}; first epoch, not counted: {warm_up[name]:.0f})"
        )
    print(f"FFCV / torch: {median(rates['FFCV']) / median(rates['torch']):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the torch loader and of the FFCV loader.")
    parser.add_argument("--root", type=Path, help="folder of class folders (generated images)")
    parser.add_argument("--limit", type=int, default=512, help="images per epoch (512)")
    parser.add_argument("--image-size", type=int, default=224, help="side of the images, in pixels (224)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch (64)")
    parser.add_argument("--workers", type=int, default=2, help="processes of torch, threads of FFCV (2)")
    parser.add_argument("--epochs", type=int, default=3, help="number of counted epochs (3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.root
        beton = Path(temporary) / "images.beton"
        if folder is None:
            folder = Path(temporary) / "images"
            folder.mkdir()
            generate_images(folder, options.limit)
        start = time.perf_counter()
        transform = ImageTransform((options.image_size, options.image_size), crop_pct=0.875)
        count = write_beton(folder, beton, transform, limit=options.limit, workers=options.workers)
        print(f"{count} images, .beton written in {time.perf_counter() - start:.1f} s")
        print(
            f"{platform.machine()} with {os.cpu_count()} cores, {options.workers} processes or threads,"
            f" batches of {options.batch_size} at {options.image_size} pixels"
        )
        compare(folder, beton, transform, options)


if __name__ == "__main__":
    main()
