"""The description beside a .beton names its classes, and is noticed if it belongs to another file."""

import json
from pathlib import Path

import pytest
import test_ffcv
from test_ffcv import COUNT, SHORT_SIDE, S, draw
from test_write_beton import killed_at

from datamodules.beton import check_beton
from datamodules.ffcv import FFCV
from datamodules.folders import image_folder
from datamodules.write_beton import write_beton
from explainers.errors import InputError

pytestmark = test_ffcv.pytestmark


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def beton(folder):
    path = folder.parent / "whole.beton"
    assert write_beton(folder, path, image_size=SHORT_SIDE, workers=2) == COUNT
    return path


def test_a_run_killed_between_description_and_images_is_noticed(tmp_path, folder):
    """Then the file is the earlier one, which the new description does not fit, though it is as long."""
    out = tmp_path / "a.beton"
    other = draw(tmp_path / "images", names="xyz", first=100)
    write_beton(other, out, limit=6, workers=1)
    size = out.stat().st_size
    killed_at(2, folder, out)
    assert out.stat().st_size == size and check_beton(out) == 6
    with pytest.raises(
        InputError, match=r"a.beton and .*a.beton.json to be written together, got .* write both again: "
    ):
        FFCV(val=str(out)).setup("validate")


def test_the_description_tells_what_was_written_and_of_what(tmp_path, folder, beton):
    description = json.loads(Path(f"{beton}.json").read_text())
    assert (description["classes"], description["samples"]) == (["a", "b", "c"], COUNT)
    assert description["bytes"] == beton.stat().st_size
    assert description["source"] == image_folder(folder, SHORT_SIDE).fingerprint()
    assert description["settings"] == {"image_size": SHORT_SIDE, "quality": 90, "limit": None, "skip_corrupt": False}


def without_first_class(folder, root):
    for path in sorted(folder.glob("[bc]/*.png")):
        (root / path.parent.name).mkdir(parents=True, exist_ok=True)
        (root / path.parent.name / path.name).write_bytes(path.read_bytes())
    return root


def test_classes_that_differ_between_training_and_validation_are_an_error(tmp_path, folder, beton):
    """A file that lacks the first class shifts the labels of all others."""
    val = tmp_path / "val.beton"
    write_beton(without_first_class(folder, tmp_path / "images"), val, image_size=SHORT_SIDE, workers=1)
    with pytest.raises(InputError, match=r"got 3 and 2 that differ in \['a'\]: labels number .*; write .* again"):
        FFCV(train=str(beton), val=str(val)).setup("fit")
    FFCV(train=str(beton), val=str(beton)).setup("fit")
    FFCV(train=str(beton), val=str(val)).setup("validate")


def test_a_file_of_another_writer_is_read_with_one_warning_that_its_classes_are_unknown(tmp_path, beton):
    other = tmp_path / "val.beton"
    other.write_bytes(beton.read_bytes())
    data = FFCV(train=str(beton), val=str(other), test=str(other), image_size=S)
    with pytest.warns(UserWarning) as caught:
        data.setup()
    (message,) = [str(warning.message) for warning in caught if "classes" in str(warning.message)]
    assert f"the classes of {other} are unknown, because there is no {other}.json" in message
    assert data.class_names("val") == [] and data.class_names("train") == data.classes == ["a", "b", "c"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"samples": 46}', '{"classes": 3}', "null"])
def test_a_description_that_cannot_be_read_is_named(tmp_path, beton, content):
    out = tmp_path / "a.beton"
    out.write_bytes(beton.read_bytes())
    Path(f"{out}.json").write_text(content)
    with pytest.raises(InputError, match=r"a.beton.json.*write it again: python -m"):
        FFCV(val=str(out)).setup("validate")


def test_a_fingerprint_is_that_of_the_file_and_the_crop(tmp_path, beton):
    def fingerprint(path=beton, **settings):
        return FFCV(val=str(path), **{"image_size": S} | settings).fingerprint("val")

    copy, other = tmp_path / "a.beton", tmp_path / "b.beton"
    copy.write_bytes(beton.read_bytes())
    content = bytearray(beton.read_bytes())
    content[9_000_000] ^= 1
    other.write_bytes(content)
    first = fingerprint()
    assert first.keys() == {"image", "label", "images"} and first["images"] == str(COUNT)
    assert fingerprint(copy) == first
    assert fingerprint(image_size=32)["image"] != first["image"] != fingerprint(crop_fraction=0.5)["image"]
    assert fingerprint(image_size=32)["label"] == first["label"]
    assert fingerprint(other)["image"] != first["image"] and fingerprint(other)["label"] != first["label"]
