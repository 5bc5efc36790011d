"""A fingerprint has an entry for each entry of a sample, and changes exactly with what the samples hold."""

import os
import time
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
from PIL import Image

from datamodules.cached import Cached
from datamodules.datasets import ImageFiles
from datamodules.digits import TASKS, Digits
from datamodules.folders import image_folder
from datamodules.images import Images
from datamodules.torchvision_sets import ImageArrays
from datamodules.truth import Boxes
from explainers.images.transform import ImageTransform


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("explainers.saved.files.SETTLED", 0)  # remember young files too


BOXES = [[(1.0, 2.0, 9.0, 8.0)], [], [(0.0, 0.0, 4.0, 4.0), (5.0, 5.0, 20.0, 9.0)], [(3.0, 3.0, 12.0, 12.0)]]


@pytest.fixture
def paths(tmp_path):
    """Four files of noise, uncompressed, so that their sizes are equal."""
    paths = [tmp_path / "images" / f"{i}.bmp" for i in range(4)]
    paths[0].parent.mkdir()
    for i, path in enumerate(paths):
        pixels = np.random.default_rng(i).integers(0, 256, (24, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


def image_files(files, **settings):
    return ImageFiles(
        **{"paths": files, "labels": [0, 1, 1, 0], "transform": ImageTransform((8, 8)), "truth": Boxes(BOXES)}
        | settings
    )


def image_arrays(files=None, seed=0, **settings):
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    arguments = {
        "labels": [0, 1, 0, 1],
        "classes": ["a", "b"],
        "chosen": (0, 1, 2),
        "transform": ImageTransform((48, 48)),
    }
    return ImageArrays(**{"pixels": pixels} | arguments | settings)


def digits(files=None, **settings):
    return Digits(**{"size": 3, "domain": "mixed"} | settings)


# For each data set and argument: another value, and the entries that it changes
CHANGES = {
    image_files: {
        "paths": (lambda paths: [paths[0], paths[2], paths[1], paths[3]], {"image", "truth"}),
        "labels": (lambda _: [0, 1, 0, 1], {"label"}),
        "transform": (lambda _: ImageTransform((8, 8), "squash"), {"image", "truth"}),
        "truth": (lambda _: Boxes(BOXES[::-1]), {"truth"}),
        "crop_fraction": (lambda _: 0.5, {"image", "truth"}),
        "limit": (lambda _: 2, {"image", "label", "truth"}),
    },
    image_arrays: {
        "pixels": (lambda _: image_arrays(seed=1).pixels, {"image"}),
        "labels": (lambda _: [0, 1, 1, 1], {"label"}),
        "chosen": (lambda _: (0, 3, 2), {"image"}),
        "transform": (lambda _: ImageTransform((64, 64)), {"image"}),
    },
    digits: {
        "split": (lambda _: "val", {"image", "label", "truth"}),
        "task": (lambda _: "odd", {"label"}),
        "size": (lambda _: 4, {"image", "label", "truth"}),
        "image_size": (lambda _: 32, {"image", "truth"}),
        "scraps": (lambda _: 2, {"image", "truth"}),
        "domain": (lambda _: "textured", {"image", "truth"}),
        "without": (lambda _: "plain", {"image"}),
        "seed": (lambda _: 1, {"image", "label", "truth"}),
    },
}
# Names are in no sample, and whether a corrupt image is an error changes none
WITHOUT_EFFECT = [
    (image_files, {"classes": ["x", "y"]}),
    (image_files, {"skip_corrupt": True}),
    (image_arrays, {"classes": ["x", "y"]}),
]


def entries(dataset):
    """The entries of all samples: name → contents in order."""
    samples = [dataset[i] for i in range(len(dataset))]
    return {name: [np.asarray(sample[name]).tolist() for sample in samples] for name in samples[0] if name != "index"}


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("build", "name"),
    [(build, name) for build, table in CHANGES.items() for name in table],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_argument_changes_the_entries_that_it_changes_in_the_samples(paths, build, name):
    value, expected = CHANGES[build][name]
    first, second = build(paths), build(paths, **{name: value(paths)})
    assert changed(first.fingerprint(), second.fingerprint()) == expected
    assert changed(entries(first), entries(second)) <= expected


@pytest.mark.parametrize(("build", "settings"), WITHOUT_EFFECT)
def test_an_argument_without_effect_changes_no_sample(paths, build, settings):
    first, second = build(paths), build(paths, **settings)
    assert first.fingerprint() == second.fingerprint()
    assert entries(first) == entries(second)


@pytest.mark.parametrize("build", CHANGES, ids=lambda build: build.__name__)
def test_a_fingerprint_has_the_entries_of_a_sample_and_is_repeatable(paths, build):
    dataset = build(paths)
    assert dataset.fingerprint().keys() == dataset[0].keys() - {"index"}
    assert dataset.fingerprint() == build(paths).fingerprint()
    assert all(isinstance(value, str) for value in dataset.fingerprint().values())


def test_one_edited_pixel_changes_the_image_though_size_and_time_are_what_they_were(paths):
    before, status = image_files(paths, truth=None).fingerprint(), paths[1].stat()
    time.sleep(0.05)  # the clock of a file system ticks every few milliseconds
    content = bytearray(paths[1].read_bytes())
    content[-1] ^= 1
    paths[1].write_bytes(content)
    os.utime(paths[1], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (paths[1].stat().st_size, paths[1].stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert changed(before, image_files(paths, truth=None).fingerprint()) == {"image"}


def test_names_and_folders_of_files_do_not_count(paths, tmp_path):
    before = image_files(paths).fingerprint()
    moved = [tmp_path / "elsewhere" / f"{name}.bmp" for name in "abcd"]
    moved[0].parent.mkdir()
    for path, target in zip(paths, moved, strict=True):
        path.rename(target)
    assert image_files(moved).fingerprint() == before


def test_equal_samples_by_other_arguments_have_equal_fingerprints(paths):
    half = image_files(paths[::2], labels=[0, 1], truth=Boxes(BOXES[::2]))
    assert half.fingerprint() == image_files(paths, limit=2).fingerprint()
    assert image_arrays(chosen=(0, 1)).fingerprint() != image_arrays(chosen=(1, 0)).fingerprint()


def test_an_image_and_its_label_moved_to_another_class_change_both(tmp_path):
    for i in range(4):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.new("RGB", (20, 20), (i, 0, 0)).save(tmp_path / "ab"[i % 2] / f"{i}.png")
    before = image_folder(tmp_path, ImageTransform((8, 8))).fingerprint()
    (tmp_path / "a" / "2.png").rename(tmp_path / "b" / "2.png")
    after = image_folder(tmp_path, ImageTransform((8, 8))).fingerprint()
    assert changed(before, after) == {"label", "image"}
    (tmp_path / "b").rename(tmp_path / "c")  # the order stays
    assert image_folder(tmp_path, ImageTransform((8, 8))).fingerprint() == after


def test_a_change_of_what_draws_the_digits_changes_their_images(monkeypatch):
    before, own = digits().fingerprint(), Digits._background
    monkeypatch.setattr(Digits, "_background", lambda *args: own(*args) * 0.99)
    assert changed(before, digits().fingerprint()) == {"image"}


def test_loaders_give_the_fingerprint_and_the_number_of_their_images(tmp_path, paths):
    images = Images(test=partial(image_files, paths, classes=["cat", "dog"]), val=partial(digits, size=2))
    assert images.fingerprint("test") == image_files(paths).fingerprint() | {
        "images": "4",
        "transform": asdict(ImageTransform((8, 8))),
    }
    assert images.fingerprint("val")["images"] == "2"
    assert images.class_names("test") == ["cat", "dog"] and images.class_names("val") == TASKS["digit"][0]
    stored = Cached(images, str(tmp_path / "rows"))
    assert stored.fingerprint("test") == images.fingerprint("test")
    assert stored.class_names("test") == ["cat", "dog"]
