"""Settings of data that cannot work end in one line that names them, before any image is read."""

from functools import partial

import pytest

from datamodules.cached import Cached
from datamodules.datasets import ImageFiles
from datamodules.digits import DigitImages, Digits
from datamodules.ffcv import FFCV
from datamodules.folders import ImageFolders
from datamodules.images import Images
from datamodules.mura import mura
from datamodules.torchvision_sets import ImageArrays
from datamodules.write_beton import write_beton
from explainers.errors import InputError

FOLDERS = partial(ImageFolders, "data", 224, splits={"train": "train"})
LOADING = [Images, FOLDERS, partial(DigitImages, 64), partial(FFCV, "train.beton")]


def refused(build, line, **settings):
    with pytest.raises(InputError) as error:
        build(**settings)
    assert line in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size"])
@pytest.mark.parametrize("build", LOADING)
def test_batches_have_at_least_one_image(build, name, number):
    refused(build, f"expected {name} above 0, got {name}={number}", **{name: number})


@pytest.mark.parametrize("build", LOADING)
def test_workers_are_none_or_some(build):
    refused(build, "expected num_workers of at least 0, got num_workers=-1", num_workers=-1)
    assert build(num_workers=0).num_workers == 0


@pytest.mark.parametrize("build", LOADING)
def test_evaluation_batches_are_those_of_training_unless_told_otherwise(build):
    assert build(batch_size=7).eval_batch_size == 7
    assert build(batch_size=7, eval_batch_size=3).eval_batch_size == 3


@pytest.mark.parametrize("size", [0, -8])
@pytest.mark.parametrize(
    "build",
    [
        partial(ImageFiles, [], []),
        partial(ImageArrays, None, [], [], []),
        partial(Digits, size=1),
        FFCV,
        partial(write_beton, "folder", "a.beton"),
    ],
)
def test_images_have_at_least_one_pixel(build, size):
    refused(build, f"expected image_size above 0, got image_size={size}", image_size=size)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.2])
def test_a_crop_keeps_a_part_of_the_image(fraction):
    line = f"expected crop_fraction to be above 0 and at most 1, got {fraction}"
    refused(partial(ImageFiles, [], [], 8), line, crop_fraction=fraction)
    refused(FFCV, line, crop_fraction=fraction)


def test_a_canvas_is_a_whole_number_of_spots():
    refused(partial(Digits, size=1), "expected image_size as a multiple of 8 for spots, got 60", image_size=60)
    assert Digits(size=1, image_size=60, domain="plain")[0]["image"].shape == (3, 60, 60)


@pytest.mark.parametrize("number", [0, -3])
def test_splits_of_digits_have_at_least_one_canvas(number):
    refused(partial(DigitImages, 64), f"expected size.val above 0, got size.val={number}", size={"val": number})


def test_rows_are_computed_of_at_least_one_image_at_a_time(tmp_path):
    refused(partial(Cached, Images(), str(tmp_path)), "expected batch_size above 0, got batch_size=0", batch_size=0)


@pytest.mark.parametrize("name", ["quality", "workers"])
def test_a_beton_is_written_by_some_workers_in_some_quality(name):
    refused(partial(write_beton, "folder", "a.beton"), f"expected {name} above 0, got {name}=0", **{name: 0})


def test_an_unknown_split_of_mura_is_named_with_those_that_there_are(tmp_path):
    refused(partial(mura, tmp_path, image_size=8), "expected split train or valid, got val", split="val")
