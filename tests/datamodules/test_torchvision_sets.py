"""Data sets of torchvision, from a few images in the layout that torchvision reads."""

import csv

import numpy as np
import pytest
import torch
from commands import composed
from hydra.utils import instantiate
from PIL import Image

from datamodules.torchvision_sets import DATA_SETS, HELD_OUT, TorchvisionImages, torchvision_images
from explainers.images.transform import ImageTransform

TRAIN, TEST = 10, 5  # images of each split, of the classes 0, 1, 0, 1, ...


def noise(count, seed, side=8, channels=3):
    shape = (count, side, side, channels)[: 3 + (channels > 1)]
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "ppm" if path.suffix == ".ppm" else "png")  # no JPEG: it changes pixels


def write_mnist(root, name):
    folder = root / "MNIST/raw"
    folder.mkdir(parents=True)
    splits = noise(TRAIN, 0, channels=1), noise(TEST, 1, channels=1)
    for part, pixels in zip(("train", "t10k"), splits, strict=True):
        header = b"".join(number.to_bytes(4, "big") for number in (0x803, *pixels.shape))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = np.arange(len(pixels), dtype=np.uint8) % 2
        header = b"".join(number.to_bytes(4, "big") for number in (0x801, len(pixels)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return splits


def write_gtsrb(root, name):
    train, test = noise(TRAIN, 0), noise(TEST, 1)
    order = sorted(range(TRAIN), key=lambda i: i % 2)
    for i in order:
        save(root / f"gtsrb/GTSRB/Training/{i % 2:05}/{i:05}.ppm", train[i])
    for i in range(TEST):
        save(root / f"gtsrb/GTSRB/Final_Test/Images/{i}.ppm", test[i])
    with open(root / "gtsrb/GT-final_test.csv", "w") as file:
        csv.writer(file, delimiter=";").writerows(
            [["Filename", "ClassId"], *([f"{i}.ppm", i % 2] for i in range(TEST))]
        )
    return train[order], test


def write_dtd(root, name):
    train, test = noise(TRAIN, 0), noise(TEST, 1)
    for part, pixels in (("train", train), ("val", test[::-1]), ("test", test)):
        names = [f"{('banded', 'polka-dotted')[i % 2]}/{part}{i}.jpg" for i in range(len(pixels))]
        for path, image in zip(names, pixels, strict=True):
            save(root / "dtd/dtd/images" / path, image)
        (root / "dtd/dtd/labels").mkdir(exist_ok=True)
        (root / f"dtd/dtd/labels/{part}1.txt").write_text("\n".join(names))
    return train, test


def write_folders(root, name):
    """EuroSAT, RESISC45 and SUN397: files of classes, of which every fifth is a test image."""
    folder = root / DATA_SETS[name].place
    pixels = noise(TRAIN + TEST, 0)
    names = ("a/abbey", "a/apse/indoor") if name == "SUN397" else ("AnnualCrop", "Forest")
    for i, image in enumerate(pixels):
        save(folder / names[i >= 8] / f"sun_{i:02}.jpg", image)
    if name == "SUN397":
        (folder / "ClassName.txt").write_text("".join(f"/{each}\n" for each in names))
    held_out = np.arange(len(pixels)) % HELD_OUT == HELD_OUT - 1
    return pixels[~held_out], pixels[held_out]


FOLDERS = ("EuroSAT", "RESISC45", "SUN397")
WRITERS = {"MNIST": write_mnist, "GTSRB": write_gtsrb, "DTD": write_dtd}
WRITERS |= dict.fromkeys(FOLDERS, write_folders)
"""Torchvision's own class → what writes its files: one of each way in which it keeps pixels."""
CLASSES = {
    "DTD": ["banded", "polka-dotted"],
    "EuroSAT": ["annual crops", "forest"],
    "GTSRB": ["speed limit 20 km/h", "speed limit 30 km/h"],
    "MNIST": ["0", "1"],
    "RESISC45": ["AnnualCrop", "Forest"],
    "SUN397": ["abbey", "indoor apse"],
}


def as_sample(pixels, size):
    """Resized by Pillow, grey repeated: (3, size, size)."""
    image = Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("name", WRITERS)
def test_the_images_of_a_split_are_those_on_disk(name, tmp_path):
    train, test = WRITERS[name](tmp_path, name)
    for split, pixels in (("train", train), ("test", test)):
        dataset = torchvision_images(tmp_path, name, split, transform=ImageTransform((16, 16)))
        assert len(dataset) == len(pixels) and dataset.classes[:2] == CLASSES[name]
        for i, image in enumerate(pixels):
            sample = dataset[i]
            assert torch.equal(sample["image"], as_sample(image, 16)) and sample["image"].is_contiguous()
            assert (sample["index"], sample["label"]) == (i, dataset.labels[i])
        assert dataset.fingerprint().keys() == {"image", "label"}
    assert dataset.labels.tolist() == ([0, 1, 1] if name in FOLDERS else [0, 1, 0, 1, 0])
    assert len(dataset.classes) == len(DATA_SETS[name].classes or CLASSES[name])


@pytest.mark.parametrize("name", ["MNIST", "EuroSAT", "DTD"])
def test_validation_images_are_the_test_images_unless_halved_or_official(name, tmp_path):
    WRITERS[name](tmp_path, name)

    def shown(split, **settings):
        data = TorchvisionImages(str(tmp_path), name, ImageTransform((8, 8)), num_workers=0, **settings)
        return [sample["image"].tolist() for sample in data.dataset(split)]

    val, test = shown("val"), shown("test")
    halves = shown("val", halve=True), shown("test", halve=True)
    if name == "DTD":
        assert val == test[::-1] == halves[0]
    else:
        assert val == test and halves == (test[::2], test[1::2])
    assert len(shown("test", limit={"test": 2})) == 2


def test_the_data_sets_of_the_configs_have_names_and_prompts(tmp_path):
    WRITERS["MNIST"](tmp_path, "MNIST")
    data = instantiate(composed("data=mnist", f"data_dir={tmp_path}", folder=tmp_path).data)
    data.setup("fit")
    assert data.classes == list("0123456789")
    assert [template.format("7") for template in data.templates] == [
        'a photo of the digit "7".',
        'the handwritten digit "7".',
    ]
    assert composed("data=cifar100", folder=tmp_path).data.name == "CIFAR100"
